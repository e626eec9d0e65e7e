// What all io threads of a server share.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cstdint>

#include "api/explanation.h"
#include "api/metrics.h"
#include "api/served_model.h"
#include "api/server.h"

namespace fathom {

struct ApiContext {
  ApiContext(const ServerOptions& server_options, ServedModel served)
      : options(server_options),
        model(std::move(served)),
        metrics(options.metrics_prefix, model.names.front(), *model.engine, model.counters),
        text_pool(static_cast<size_t>(options.text_threads)) {}

  const ServerOptions options;
  const ServedModel model;
  Metrics metrics;
  ExplainLog explanations;
  boost::asio::thread_pool text_pool;
  std::atomic<bool> draining{false};
  std::atomic<bool> stopping{false};  // connections that begin now end at once
  std::atomic<int64_t> active{0};     // requests between their head and the end of their reply

  // Runs fn() on the text pool and resumes the caller on its io thread with the result.
  template <class Fn>
  boost::asio::awaitable<std::invoke_result_t<Fn>> OnTextPool(Fn fn) {
    using Result = std::invoke_result_t<Fn>;
    auto job = [](Fn work) -> boost::asio::awaitable<Result> { co_return work(); };
    co_return co_await boost::asio::co_spawn(text_pool.get_executor(), job(std::move(fn)),
                                             boost::asio::use_awaitable);
  }
};

}  // namespace fathom
