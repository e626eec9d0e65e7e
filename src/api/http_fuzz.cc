// Bytes as HTTP: the parser under our limits, routing and refusals, without sockets. The first byte
// chooses how the rest is cut into reads.
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "api/http_reader.h"
#include "api/router.h"

namespace {

using namespace fathom;
namespace http = boost::beast::http;

void Check(const ApiError& error) {
  const HttpResponse response = ErrorResponse(error);
  if (response.status < 400 || response.status > 505) std::abort();
  if (!nlohmann::json::accept(response.body)) std::abort();
  if (HttpReason(response.status) == "Unknown") std::abort();
}

// Feeds `bytes` to one reader; returns what a complete request leaves over.
std::string_view ReadOne(std::string_view bytes, size_t step, const HttpLimits& limits) {
  HttpReader reader(limits);
  HttpReader::Parser& parser = reader.parser();
  size_t offered = 0, used = 0;
  while (!parser.is_done()) {
    if (offered == bytes.size()) return {};
    offered = std::min(bytes.size(), offered + step);
    boost::beast::error_code error;
    while (used < offered && !parser.is_done()) {
      const size_t taken =
          parser.put(boost::asio::const_buffer(bytes.data() + used, offered - used), error);
      used += taken;
      if (error == http::error::need_more) {
        error = {};
        break;
      }
      if (error) {
        Check(HttpReader::ToError(error, limits));
        return {};
      }
      if (taken == 0) break;
    }
  }
  const HttpRequest request = reader.Head();
  const RouteMatch match = MatchRoute(request.method, request.path);
  if (match.route == Route::kNotFound) Check(HttpError(404, "there is no " + request.path));
  if (match.route == Route::kMethodNotAllowed && match.allow.empty()) std::abort();
  const std::string id = ChooseRequestId(request.request_id);
  if (id.find_first_of("\r\n ") != std::string::npos || id.empty()) std::abort();
  SameSecret("secret", request.authorization);
  if (reader.TakeBody().size() > limits.body_bytes) std::abort();
  return bytes.substr(used);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  HttpLimits limits;
  limits.header_bytes = 1024;
  limits.body_bytes = 4096;
  const size_t step = data[0] == 0 ? size : data[0];
  std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  for (int requests = 0; requests < 16 && !rest.empty(); ++requests) {
    rest = ReadOne(rest, step, limits);
  }
  return 0;
}
