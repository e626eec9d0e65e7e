// HTTP requests and replies as the routes see them; no library types.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/api_error.h"

namespace fathom {

struct HttpLimits {
  uint32_t header_bytes = 32 * 1024;              // beyond: 431
  uint64_t body_bytes = 64ull << 20;              // beyond: 413
  std::chrono::milliseconds header_time{30'000};  // from the first byte to the end of the head: 408
  std::chrono::milliseconds body_time{120'000};   // for the body: 408
  std::chrono::milliseconds idle_time{120'000};   // between requests of a connection: closed
  std::chrono::milliseconds write_time{60'000};   // a reader that takes nothing for so long is cut
  size_t stream_buffer_bytes = 1 << 20;           // of events a slow reader may leave behind: cut
};

// Of the buffer between socket and parser: heads are limited by HttpLimits, but chunk extensions
// and trailers count as neither head nor body and end here.
inline constexpr size_t kHttpBufferBytes = 1 << 20;

struct HttpRequest {
  std::string method;  // as sent: "GET"
  std::string path;    // percent-decoded, without the query
  std::string authorization, api_key, origin, request_id, content_encoding, transfer_encoding;
  std::string body;
  bool http10 = false;
  bool keep_alive = true;
  bool expects_continue = false;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  bool close = false;  // the connection ends after it
  std::string note;    // of a refusal, for the log
};

std::string_view HttpReason(int status);

// A Date header's value (RFC 9110 5.6.7): "Sun, 06 Nov 1994 08:49:37 GMT".
std::string HttpDate(std::time_t time);

// OpenAI's error shape with Retry-After where it applies.
HttpResponse ErrorResponse(const ApiError& error);

// Decodes %XX; malformed escapes stay as they are.
std::string PercentDecode(std::string_view text);

// Constant-time comparison of secrets.
bool SameSecret(std::string_view a, std::string_view b);

// A client's request id if it is 1 to 128 visible ASCII characters, else a fresh random one.
std::string ChooseRequestId(std::string_view given);

}  // namespace fathom
