#include "api/bridge.h"

#include <boost/asio/post.hpp>
#include <utility>

namespace fathom {

void Bridge::Deliver(std::vector<Output> outputs) {
  if (closed_) return;
  boost::asio::post(*io_, [self = shared_from_this(), batch = std::move(outputs)]() mutable {
    self->Dispatch(std::move(batch));
  });
}

void Bridge::Dispatch(std::vector<Output> outputs) {
  touched_.clear();
  for (Output& output : outputs) {
    const auto entry = table_.find(output.id);
    if (entry == table_.end()) continue;  // its connection is gone
    OutputSink* sink = entry->second.sink;
    if (sink == nullptr) {
      if (!output.finish) continue;
      const std::function<void(Output)> last = std::move(entry->second.last);
      table_.erase(entry);
      last(std::move(output));
      continue;
    }
    if (!std::exchange(sink->touched_, true)) touched_.push_back(sink);
    sink->OnOutput(entry->second.choice, std::move(output));
  }
  // Sinks wake their coroutines through the io context, so none is destroyed inside this loop.
  for (OutputSink* sink : touched_) {
    sink->touched_ = false;
    sink->OnBatchEnd();
  }
}

}  // namespace fathom
