// A plain HTTP client for the commands that ask a running server.
//
//   FATHOM_ASSIGN(HttpReply reply, HttpGet("http://127.0.0.1:8000", "/v1/models", ""));
#pragma once

#include <chrono>
#include <string>

#include "core/status.h"

namespace fathom {

struct HttpReply {
  int status = 0;
  std::string body;
};

struct HttpUrl {
  std::string host, port;  // "80" when the URL names none
  std::string path;        // in front of every target; no slash at its end
};

// "http://HOST[:PORT][/PATH]", brackets around IPv6. kInvalidArgument for anything else; https is
// told apart, since there is no TLS here.
Expected<HttpUrl> ParseHttpUrl(const std::string& url);

// GET url + target. `api_key`: empty or sent as a bearer token. kUnavailable names the URL when
// nobody answers within `limit`; every status of an answer is a reply.
Expected<HttpReply> HttpGet(const std::string& url, const std::string& target,
                            const std::string& api_key,
                            std::chrono::seconds limit = std::chrono::seconds(30));

// Everything but letters, digits and "-._~" as %XX.
std::string PercentEncode(const std::string& text);

}  // namespace fathom
