#include "api/http_reader.h"

#include <boost/beast/core/error.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/field.hpp>

namespace fathom {

namespace http = boost::beast::http;

HttpReader::HttpReader(const HttpLimits& limits) {
  parser_.header_limit(limits.header_bytes);
  parser_.body_limit(limits.body_bytes);
}

HttpRequest HttpReader::Head() const {
  const auto& message = parser_.get();
  HttpRequest request;
  request.method = message.method_string();
  std::string_view target = {message.target().data(), message.target().size()};
  if (target.substr(0, 7) == "http://") {  // absolute form
    const size_t slash = target.find('/', 7);
    target = slash == target.npos ? "/" : target.substr(slash);
  }
  request.path = PercentDecode(target.substr(0, target.find_first_of("?#")));
  const auto field = [&](auto name) {
    const auto found = message.find(name);
    return found == message.end() ? std::string() : std::string(found->value());
  };
  request.authorization = field(http::field::authorization);
  request.api_key = field("x-api-key");
  request.origin = field(http::field::origin);
  request.request_id = field("x-request-id");
  request.content_encoding = field(http::field::content_encoding);
  request.transfer_encoding = field(http::field::transfer_encoding);
  request.http10 = message.version() < 11;
  request.keep_alive = message.keep_alive();
  request.expects_continue =
      boost::beast::iequals(message[http::field::expect], "100-continue") && !request.http10;
  return request;
}

std::optional<ApiError> HttpReader::CheckFraming(const HttpRequest& request) {
  if (!request.transfer_encoding.empty() &&
      !boost::beast::iequals(request.transfer_encoding, "chunked")) {
    return HttpError(501, fmt::format("Transfer-Encoding '{}' is not supported; send 'chunked'",
                                      request.transfer_encoding));
  }
  return std::nullopt;
}

ApiError HttpReader::ToError(boost::beast::error_code error, const HttpLimits& limits) {
  if (error == http::error::header_limit) {
    return HttpError(431, fmt::format("the request head exceeds {} bytes", limits.header_bytes));
  }
  if (error == http::error::body_limit) {
    return HttpError(413, fmt::format("the request body exceeds {} bytes", limits.body_bytes));
  }
  if (error == http::error::buffer_overflow) {
    return HttpError(
        431, fmt::format("a chunk extension or trailer exceeds {} bytes", kHttpBufferBytes));
  }
  if (error == http::error::bad_version) {
    return HttpError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
  }
  return HttpError(400, fmt::format("malformed HTTP request: {}", error.message()));
}

}  // namespace fathom
