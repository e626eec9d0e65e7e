// Server: the HTTP API over one engine.
//
//   FATHOM_ASSIGN(auto server, Server::Start(options, model));
//   server->port();  ...
//   server->BeginDrain();                        // new generation requests get 503
//   server->WaitDrained(std::chrono::hours(1));  // running ones finish
//
// Sockets are spread over `http_threads` io threads; each connection stays on one. Tokenising runs
// on a pool of its own so that a megabyte of prompt never stalls the streams.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "api/http_types.h"
#include "api/served_model.h"
#include "core/status.h"

namespace fathom {

struct ServerOptions {
  std::string host = "0.0.0.0";
  int port = 8000;  // 0: any free one
  int http_threads = 1;
  int text_threads = 2;
  std::vector<std::string> api_keys;         // empty: open
  std::vector<std::string> allowed_origins;  // CORS; "*" allows all; empty: no CORS headers
  std::string metrics_prefix = "vllm:";
  HttpLimits limits;
  std::chrono::milliseconds heartbeat{5'000};      // ": heartbeat" into a silent stream
  std::chrono::milliseconds log_interval{10'000};  // between lines about throughput
  // Work exists and no step ends for so long: /health answers 503.
  std::chrono::milliseconds unhealthy_after{60'000};
  // ... and for so long: the requests in progress fail.
  std::chrono::milliseconds stall_limit{300'000};
};

class Server {
 public:
  // Listens and serves from then on. Everything in `model` must outlive the server.
  static Expected<std::unique_ptr<Server>> Start(const ServerOptions& options, ServedModel model);
  ~Server();  // closes every connection and joins; what still runs in the engine is cancelled

  int port() const;
  void BeginDrain();
  // True when no request is in progress any more.
  bool WaitDrained(std::chrono::milliseconds limit);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
