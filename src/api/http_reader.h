// HttpReader: bytes to one HttpRequest through Beast's parser under our limits. Sockets and the
// fuzzer use the same object. Included by the connection alone (Boost headers are slow to compile).
#pragma once

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>

#include "api/http_types.h"

namespace fathom {

class HttpReader {
 public:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  explicit HttpReader(const HttpLimits& limits);
  Parser& parser() { return parser_; }

  // The head (everything but the body), valid once the header is done.
  HttpRequest Head() const;
  // What makes the end of this request's body uncertain, so that reading on as if it were known
  // could take body bytes for a request: a transfer coding other than chunked (RFC 9112 6.3). The
  // connection closes after the answer.
  static std::optional<ApiError> CheckFraming(const HttpRequest& request);

  // Moves the body out; the message must be done.
  std::string TakeBody() { return std::move(parser_.get().body()); }

  // What to answer to a failure to parse: 400, 413, 431 or 505; the connection closes after it.
  static ApiError ToError(boost::beast::error_code error, const HttpLimits& limits);

 private:
  Parser parser_;
};

}  // namespace fathom
