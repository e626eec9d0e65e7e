#include "api/server.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>

#include "api/api_context.h"
#include "api/api_handler.h"
#include "api/throughput_log.h"
#include "core/log.h"

namespace fathom {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

// One io thread: its event loop, the engine's way to it, its connections.
struct IoThread {
  explicit IoThread(ApiContext& api)
      : io(std::make_shared<asio::io_context>(1)),
        work(io->get_executor()),
        bridge(std::make_shared<Bridge>(io)),
        handler(std::make_shared<ApiHandler>(api, bridge)) {}

  std::shared_ptr<asio::io_context> io;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  std::shared_ptr<Bridge> bridge;
  std::shared_ptr<ApiHandler> handler;
  std::unordered_set<Connection*> connections;  // touched by this thread alone
  std::thread thread;
};

asio::awaitable<void> Serve(const ApiContext& api, IoThread& io,
                            std::shared_ptr<Connection> connection) {
  if (api.stopping) co_return;
  io.connections.insert(connection.get());
  co_await connection->Run();
  io.connections.erase(connection.get());
}

Expected<tcp::endpoint> ParseEndpoint(const std::string& host, int port) {
  if (port < 0 || port > 65535) {
    return FailParam(Code::kInvalidArgument, "--port", "--port {} is not within 0 .. 65535", port);
  }
  error_code error;
  const std::string name = host == "localhost" ? "127.0.0.1" : host;
  const asio::ip::address address = asio::ip::make_address(name, error);
  if (!error) return tcp::endpoint(address, static_cast<uint16_t>(port));
  asio::io_context io;
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(name, std::to_string(port), error);
  if (error || found.empty()) {
    return FailParam(Code::kInvalidArgument, "--host", "--host '{}': {}", host, error.message());
  }
  return found.begin()->endpoint();
}

}  // namespace

struct Server::Impl {
  Impl(const ServerOptions& options, ServedModel model) : api(options, std::move(model)) {
    for (int i = 0; i < std::max(1, options.http_threads); ++i) {
      threads.push_back(std::make_unique<IoThread>(api));
    }
    acceptor = std::make_unique<tcp::acceptor>(*threads.front()->io);
    report_time = std::make_unique<asio::steady_timer>(*threads.front()->io);
  }

  Status Listen() {
    FATHOM_ASSIGN(const tcp::endpoint endpoint, ParseEndpoint(api.options.host, api.options.port));
    error_code error;
    acceptor->open(endpoint.protocol(), error);
    if (!error) acceptor->set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor->bind(endpoint, error);
    if (!error) acceptor->listen(4096, error);
    if (error) {
      return FailParam(Code::kUnavailable, "--port", "cannot listen on {}:{}: {}", api.options.host,
                       api.options.port, error.message());
    }
    port = acceptor->local_endpoint().port();
    return {};
  }

  // Accepts on the first thread and deals the sockets out in turn.
  asio::awaitable<void> Accept() {
    for (size_t next = 0;; ++next) {
      IoThread& io = *threads[next % threads.size()];
      tcp::socket socket(*io.io);
      auto [error] = co_await acceptor->async_accept(socket, asio::as_tuple(asio::use_awaitable));
      if (!acceptor->is_open()) co_return;
      if (error) {  // out of file handles, or a client that left at once
        Log().warn("accept: {}", error.message());
        asio::steady_timer pause(co_await asio::this_coro::executor);
        pause.expires_after(std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::as_tuple(asio::use_awaitable));
        continue;
      }
      auto connection = std::make_shared<Connection>(std::move(socket), io.handler);
      asio::co_spawn(*io.io, Serve(api, io, std::move(connection)), asio::detached);
    }
  }

  // A line in the log every log_interval while anything runs.
  asio::awaitable<void> ReportThroughput() {
    ThroughputLog throughput;
    throughput.Line(api.model.engine->stats(), 1);  // counts from now on
    for (Clock::time_point last = Clock::now(); !api.stopping;) {
      report_time->expires_after(api.options.log_interval);
      co_await report_time->async_wait(asio::as_tuple(asio::use_awaitable));
      const Clock::time_point now = Clock::now();
      const double seconds = std::chrono::duration<double>(now - last).count();
      last = now;
      const std::optional<std::string> line =
          throughput.Line(api.model.engine->stats(), std::max(seconds, 1e-3));
      if (line && !api.stopping) Log().info("{}", *line);
    }
  }

  void Run() {
    asio::co_spawn(*threads.front()->io, Accept(), asio::detached);
    asio::co_spawn(*threads.front()->io, ReportThroughput(), asio::detached);
    for (auto& io : threads) {
      io->thread = std::thread([loop = io->io] { loop->run(); });
    }
  }

  ~Impl() {
    api.stopping = true;
    for (auto& io : threads) {
      io->bridge->Close();
      asio::post(*io->io, [this, thread = io.get()] {
        error_code ignored;
        if (thread == threads.front().get()) {
          acceptor->close(ignored);
          report_time->cancel();
        }
        for (Connection* connection : thread->connections) connection->Abort();
      });
      io->work.reset();
    }
    // Every handler ends by itself once its socket is closed.
    for (auto& io : threads) {
      if (io->thread.joinable()) io->thread.join();
    }
    api.text_pool.join();
    for (auto& io : threads) {
      io->io->restart();
      io->io->poll();  // what the engine posted last
    }
    acceptor.reset();
    report_time.reset();
  }

  ApiContext api;
  std::vector<std::unique_ptr<IoThread>> threads;
  std::unique_ptr<tcp::acceptor> acceptor;
  std::unique_ptr<asio::steady_timer> report_time;
  int port = 0;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

Expected<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, ServedModel model) {
  FATHOM_CHECK(model.engine != nullptr && model.tokenizer != nullptr && model.encoder != nullptr);
  FATHOM_CHECK(!model.names.empty());
  auto impl = std::make_unique<Impl>(options, std::move(model));
  FATHOM_TRY(impl->Listen());
  impl->Run();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

int Server::port() const {
  return impl_->port;
}

void Server::BeginDrain() {
  impl_->api.draining = true;
  impl_->api.model.engine->BeginDrain();
}

bool Server::WaitDrained(std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  while (impl_->api.active > 0 ||
         !impl_->api.model.engine->WaitIdle(std::chrono::milliseconds(0))) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace fathom
