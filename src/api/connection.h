// Connection: one client socket on one io thread. Reads requests one after another (pipelined ones
// wait in the buffer), hands each to the RequestHandler, and gives it the means to answer: a whole
// reply or a stream. While a handler runs with Watch() on, the socket is read in the background so
// that a client that goes away is noticed at once, also during prefill.
//
// A client that closes its sending side counts as gone: a half-closed connection cannot be told
// from a closed one.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "api/http_types.h"

namespace fathom {

class Connection;

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  virtual const HttpLimits& limits() const = 0;
  // Looks at the head before the body is read; an error is answered without reading it.
  virtual std::optional<ApiError> CheckHead(const HttpRequest& request) = 0;
  // Answers through Connection::Send, or StartStream and Write.
  virtual boost::asio::awaitable<void> Handle(Connection& connection, HttpRequest request) = 0;
  // Whether connections should end after the reply in progress.
  virtual bool closing() const = 0;
  // Headers every reply to this request carries (CORS).
  virtual std::vector<std::pair<std::string, std::string>> CommonHeaders(
      const HttpRequest& request) const = 0;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(boost::asio::ip::tcp::socket socket, std::shared_ptr<RequestHandler> handler);

  // Serves the socket until it ends; keep the shared pointer alive meanwhile.
  boost::asio::awaitable<void> Run();

  // The rest is for handlers.
  const std::string& request_id() const { return request_id_; }

  boost::asio::awaitable<void> Send(HttpResponse response);

  // Sends the head of a text/event-stream reply; then Write sends events. Both answer false once
  // the client is gone or too slow.
  boost::asio::awaitable<bool> StartStream();
  boost::asio::awaitable<bool> Write(std::string events);
  bool streaming() const { return streaming_; }

  void Watch();  // notice disconnects from now until the handler returns
  bool disconnected() const { return disconnected_; }

  // Returns at `time`, or as soon as Wake was called since the last return.
  boost::asio::awaitable<void> WaitUntil(std::chrono::steady_clock::time_point time);
  void Wake();

  // Ends the connection now: pending operations fail.
  void Abort();

 private:
  using Clock = std::chrono::steady_clock;

  boost::asio::awaitable<bool> ServeOne();
  boost::asio::awaitable<void> SendError(ApiError error);
  boost::asio::awaitable<bool> WriteAll(std::string data);
  boost::asio::awaitable<void> StopWatching();
  boost::asio::awaitable<void> CloseGently();
  void ReadInBackground();
  void StartDeadline(std::chrono::milliseconds limit);
  void StopDeadline();
  std::string Head(const HttpResponse& response, std::string_view framing) const;

  boost::asio::ip::tcp::socket socket_;
  std::shared_ptr<RequestHandler> handler_;
  boost::beast::flat_buffer buffer_{kHttpBufferBytes};
  boost::asio::steady_timer deadline_, wake_, watch_end_;
  boost::asio::cancellation_signal stop_watch_;
  uint64_t deadline_number_ = 0;  // a late expiry of an earlier deadline is ignored
  bool timed_out_ = false;
  bool watch_wanted_ = false, reading_ = false;
  bool disconnected_ = false;
  bool woken_ = false;
  // The request being served.
  std::string request_id_;
  std::vector<std::pair<std::string, std::string>> common_headers_;
  bool head_only_ = false, http10_ = false, keep_alive_ = true;
  bool streaming_ = false, answered_ = false;
};

}  // namespace fathom
