// Bridge: carries engine outputs to the io thread that serves their connections. One per io
// context. Deliver posts once per step; the table and the sinks belong to the io thread.
//
//   auto bridge = std::make_shared<Bridge>(io);
//   request.queue = bridge;
//   bridge->Add(*engine.Submit(std::move(request)), &sink, choice);   // on the io thread
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/request.h"

namespace fathom {

class OutputSink {
 public:
  virtual ~OutputSink() = default;
  virtual void OnOutput(size_t choice, Output output) = 0;
  virtual void OnBatchEnd() = 0;  // once per delivery that held outputs for this sink

 private:
  friend class Bridge;
  bool touched_ = false;  // by the delivery being dispatched
};

class Bridge : public OutputQueue, public std::enable_shared_from_this<Bridge> {
 public:
  explicit Bridge(std::shared_ptr<boost::asio::io_context> io) : io_(std::move(io)) {}

  void Deliver(std::vector<Output> outputs) override;  // engine thread
  void Close() { closed_ = true; }                     // later deliveries are dropped

  // The rest: io thread. Outputs of a request cannot be handled before Add when Submit and Add
  // happen in the same handler.
  void Add(RequestId id, OutputSink* sink, size_t choice) { table_[id] = {sink, choice, {}}; }
  void Remove(RequestId id) { table_.erase(id); }
  // In the place of the request's sink: `last` gets its last output, nobody the others.
  void AwaitLast(RequestId id, std::function<void(Output)> last) {
    table_[id] = {nullptr, 0, std::move(last)};
  }

 private:
  struct Entry {
    OutputSink* sink = nullptr;
    size_t choice = 0;
    std::function<void(Output)> last;
  };
  void Dispatch(std::vector<Output> outputs);

  std::shared_ptr<boost::asio::io_context> io_;
  std::atomic<bool> closed_{false};
  std::unordered_map<RequestId, Entry> table_;
  std::vector<OutputSink*> touched_;
};

}  // namespace fathom
