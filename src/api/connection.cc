// g++ 12 takes the frame allocator of Asio's coroutines for a mismatched pair once it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

#include "api/connection.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>

#include "api/http_reader.h"
#include "core/log.h"

namespace fathom {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
// Pipelined bytes taken while a handler runs; more stays in the kernel.
constexpr size_t kBackgroundBytes = 64 * 1024;
constexpr uint64_t kDroppedBody = 1 << 20;

}  // namespace

Connection::Connection(tcp::socket socket, std::shared_ptr<RequestHandler> handler)
    : socket_(std::move(socket)),
      handler_(std::move(handler)),
      deadline_(socket_.get_executor()),
      wake_(socket_.get_executor()),
      watch_end_(socket_.get_executor()) {}

void Connection::StartDeadline(std::chrono::milliseconds limit) {
  timed_out_ = false;
  const uint64_t number = ++deadline_number_;
  deadline_.expires_after(limit);
  deadline_.async_wait([self = shared_from_this(), number](error_code error) {
    if (error || number != self->deadline_number_) return;
    self->timed_out_ = true;
    error_code ignored;
    self->socket_.cancel(ignored);
  });
}

void Connection::StopDeadline() {
  ++deadline_number_;
  deadline_.cancel();
}

void Connection::Abort() {
  error_code ignored;
  socket_.close(ignored);
  disconnected_ = true;
  Wake();
}

void Connection::Wake() {
  woken_ = true;
  wake_.cancel();
}

asio::awaitable<void> Connection::WaitUntil(Clock::time_point time) {
  if (!woken_) {
    wake_.expires_at(time);
    co_await wake_.async_wait(kAwait);
  }
  woken_ = false;
}

void Connection::Watch() {
  watch_wanted_ = true;
  if (!reading_) ReadInBackground();
}

void Connection::ReadInBackground() {
  if (buffer_.size() >= kBackgroundBytes) return;
  reading_ = true;
  socket_.async_read_some(
      buffer_.prepare(4096),
      asio::bind_cancellation_slot(
          stop_watch_.slot(), [self = shared_from_this()](error_code error, size_t bytes) {
            self->reading_ = false;
            self->buffer_.commit(bytes);
            if (!self->watch_wanted_ || error == asio::error::operation_aborted) {
              self->watch_end_.cancel();
            } else if (error) {
              self->disconnected_ = true;
              self->Wake();
            } else {
              self->ReadInBackground();
            }
          }));
}

asio::awaitable<void> Connection::StopWatching() {
  watch_wanted_ = false;
  if (!reading_) co_return;
  stop_watch_.emit(asio::cancellation_type::partial | asio::cancellation_type::total);
  while (reading_) {
    watch_end_.expires_at(Clock::time_point::max());
    co_await watch_end_.async_wait(kAwait);
  }
}

std::string Connection::Head(const HttpResponse& response, std::string_view framing) const {
  std::string head = fmt::format(
      "HTTP/1.1 {} {}\r\nServer: fathom\r\nDate: {}\r\nX-Request-Id: {}\r\n{}", response.status,
      HttpReason(response.status), HttpDate(std::time(nullptr)), request_id_, framing);
  if (response.status != 204) head += fmt::format("Content-Type: {}\r\n", response.content_type);
  for (const auto* list : {&common_headers_, &response.headers}) {
    for (const auto& [name, value] : *list) head += fmt::format("{}: {}\r\n", name, value);
  }
  if (!keep_alive_) head += "Connection: close\r\n";
  else if (http10_) head += "Connection: keep-alive\r\n";
  head += "\r\n";
  return head;
}

asio::awaitable<bool> Connection::WriteAll(std::string data) {
  if (disconnected_) co_return false;
  // Most events fit into the socket's buffer: one system call, no suspension.
  error_code error;
  size_t sent = socket_.write_some(asio::buffer(data), error);
  if (error == asio::error::would_block || error == asio::error::try_again) error = {};
  if (!error && sent < data.size()) {
    StartDeadline(handler_->limits().write_time);
    auto [failed, more] = co_await asio::async_write(
        socket_, asio::buffer(data.data() + sent, data.size() - sent), kAwait);
    StopDeadline();
    error = failed;
    if (timed_out_) {
      Log().warn("request {}: the client took nothing for {} ms, connection closed", request_id_,
                 handler_->limits().write_time.count());
    }
  }
  if (error) Abort();
  co_return !error;
}

asio::awaitable<void> Connection::Send(HttpResponse response) {
  answered_ = true;
  if (!response.note.empty()) {
    Log().debug("request {} refused: status {}, {}", request_id_, response.status, response.note);
  }
  if (response.close || handler_->closing()) keep_alive_ = false;
  std::string framing;
  if (response.status != 204) framing = fmt::format("Content-Length: {}\r\n", response.body.size());
  std::string data = Head(response, framing);
  if (!head_only_) data += response.body;
  co_await WriteAll(std::move(data));
}

asio::awaitable<void> Connection::SendError(ApiError error) {
  HttpResponse response = ErrorResponse(error);
  response.close = true;
  co_await Send(std::move(response));
}

asio::awaitable<bool> Connection::StartStream() {
  answered_ = true;
  streaming_ = true;
  HttpResponse response;
  response.content_type = "text/event-stream; charset=utf-8";
  response.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  if (handler_->closing() || http10_) keep_alive_ = false;
  std::string head = Head(response, http10_ ? "" : "Transfer-Encoding: chunked\r\n");
  co_return co_await WriteAll(std::move(head));
}

asio::awaitable<bool> Connection::Write(std::string events) {
  if (events.empty()) co_return !disconnected_;
  if (!http10_) {
    events.insert(0, fmt::format("{:x}\r\n", events.size()));
    events += "\r\n";
  }
  co_return co_await WriteAll(std::move(events));
}

// Lets the client read the reply before the connection is reset by bytes it is still sending.
asio::awaitable<void> Connection::CloseGently() {
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  StartDeadline(std::chrono::seconds(2));
  char sink[16384];
  for (size_t total = 0; total < (64u << 20);) {
    auto [error, bytes] = co_await socket_.async_read_some(asio::buffer(sink), kAwait);
    if (error) break;
    total += bytes;
  }
  StopDeadline();
  socket_.close(ignored);
}

// One request and its reply. False when the connection is to end.
asio::awaitable<bool> Connection::ServeOne() {
  const HttpLimits& limits = handler_->limits();
  request_id_.clear();
  common_headers_.clear();
  head_only_ = http10_ = streaming_ = answered_ = woken_ = false;
  keep_alive_ = true;

  if (buffer_.size() == 0) {  // an idle connection may end without a word
    StartDeadline(limits.idle_time);
    auto [error, bytes] = co_await socket_.async_read_some(buffer_.prepare(8192), kAwait);
    StopDeadline();
    if (error) co_return false;
    buffer_.commit(bytes);
  }

  HttpReader reader(limits);
  StartDeadline(limits.header_time);
  auto [head_error, head_bytes] =
      co_await http::async_read_header(socket_, buffer_, reader.parser(), kAwait);
  StopDeadline();
  if (head_error) {
    request_id_ = ChooseRequestId("");
    if (timed_out_) {
      co_await SendError(HttpError(408, "the request head did not arrive in time"));
    } else if (head_error.category() == http::make_error_code(http::error::bad_method).category() &&
               head_error != http::error::end_of_stream) {
      co_await SendError(HttpReader::ToError(head_error, limits));
    } else {
      co_return false;  // the socket failed
    }
    co_await CloseGently();
    co_return false;
  }

  HttpRequest request = reader.Head();
  request_id_ = ChooseRequestId(request.request_id);
  head_only_ = request.method == "HEAD";
  http10_ = request.http10;
  keep_alive_ = request.keep_alive;
  common_headers_ = handler_->CommonHeaders(request);
  if (const std::optional<ApiError> unclear = HttpReader::CheckFraming(request)) {
    co_await SendError(*unclear);
    co_await CloseGently();
    co_return false;
  }
  std::optional<ApiError> refusal = handler_->CheckHead(request);
  if (refusal) {
    // The body has to be out of the way before the next request can be read: a small one is read
    // and dropped, else the connection ends.
    bool drained = reader.parser().is_done();
    if (!drained && !request.expects_continue &&
        reader.parser().content_length().value_or(~uint64_t{0}) <= kDroppedBody) {
      StartDeadline(limits.body_time);
      auto [error, bytes] = co_await http::async_read(socket_, buffer_, reader.parser(), kAwait);
      StopDeadline();
      drained = !error;
    }
    HttpResponse response = ErrorResponse(*refusal);
    response.close = !drained;
    co_await Send(std::move(response));
    if (keep_alive_ && !disconnected_) co_return true;
    co_await CloseGently();
    co_return false;
  }
  if (!reader.parser().is_done()) {
    if (request.expects_continue) {
      const bool sent = co_await WriteAll("HTTP/1.1 100 Continue\r\n\r\n");
      if (!sent) co_return false;
    }
    StartDeadline(limits.body_time);
    auto [body_error, body_bytes] =
        co_await http::async_read(socket_, buffer_, reader.parser(), kAwait);
    StopDeadline();
    if (body_error) {
      if (timed_out_) {
        co_await SendError(HttpError(408, "the request body did not arrive in time"));
      } else {
        co_await SendError(HttpReader::ToError(body_error, limits));
      }
      co_await CloseGently();
      co_return false;
    }
  }
  request.body = reader.TakeBody();

  std::string failure;
  try {
    co_await handler_->Handle(*this, std::move(request));
  } catch (const std::exception& error) {
    failure = error.what();
  }
  co_await StopWatching();
  if (!failure.empty()) {
    Log().error("request {}: {}", request_id_, failure);
    if (answered_) {
      Abort();
    } else {
      co_await SendError(HttpError(500, "internal error; see the server's log"));
    }
  }
  if (streaming_ && !disconnected_ && !http10_) co_await WriteAll("0\r\n\r\n");
  if (disconnected_) co_return false;
  if (keep_alive_) co_return true;
  co_await CloseGently();
  co_return false;
}

asio::awaitable<void> Connection::Run() {
  const auto self = shared_from_this();
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  socket_.non_blocking(true, ignored);
  try {
    bool more = true;
    while (more && socket_.is_open()) more = co_await ServeOne();
  } catch (const std::exception& error) {
    Log().error("connection: {}", error.what());
  }
  socket_.close(ignored);
  deadline_.cancel();
}

}  // namespace fathom
