#include "api/api_handler.h"

#include <boost/beast/core/string.hpp>

#include "api/generate.h"
#include "api/short_routes.h"
#include "api/version.h"

namespace fathom {

namespace asio = boost::asio;

namespace {

// Counts a request as in progress for /load and drain.
class ActiveMark {
 public:
  explicit ActiveMark(ApiContext& api) : api_(api) { ++api_.active; }
  ~ActiveMark() { --api_.active; }
  ActiveMark(const ActiveMark&) = delete;

 private:
  ApiContext& api_;
};

}  // namespace

bool ApiHandler::Authorised(const HttpRequest& request) const {
  if (api_.options.api_keys.empty()) return true;
  std::string_view given = request.api_key;
  const std::string_view header = request.authorization;
  if (header.size() > 7 && boost::beast::iequals(header.substr(0, 7), "bearer ")) {
    given = header.substr(7);
  }
  bool known = false;
  for (const std::string& key : api_.options.api_keys) known |= SameSecret(key, given);
  return known;
}

std::optional<ApiError> ApiHandler::CheckHead(const HttpRequest& request) {
  const RouteMatch match = MatchRoute(request.method, request.path);
  if (match.route == Route::kNotFound) {
    return HttpError(404, fmt::format("there is no {}", request.path));
  }
  if (match.route == Route::kMethodNotAllowed) {
    return HttpError(405, fmt::format("{} is not allowed for {}; allowed: {}", request.method,
                                      request.path, match.allow));
  }
  if (NeedsKey(match.route) && !Authorised(request)) {
    return HttpError(401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'");
  }
  if (api_.draining && IsGeneration(match.route)) {
    return HttpError(503, "the server is shutting down and takes no new requests");
  }
  if (!request.content_encoding.empty() &&
      !boost::beast::iequals(request.content_encoding, "identity")) {
    return HttpError(415, fmt::format("Content-Encoding '{}' is not supported; send the body plain",
                                      request.content_encoding));
  }
  return std::nullopt;
}

std::vector<std::pair<std::string, std::string>> ApiHandler::CommonHeaders(
    const HttpRequest& request) const {
  if (request.origin.empty()) return {};
  for (const std::string& allowed : api_.options.allowed_origins) {
    if (allowed != "*" && allowed != request.origin) continue;
    return {{"Access-Control-Allow-Origin", allowed},
            {"Access-Control-Expose-Headers", "X-Request-Id"},
            {"Vary", "Origin"}};
  }
  return {};
}

HttpResponse ApiHandler::Short(const RouteMatch& match) const {
  HttpResponse response;
  switch (match.route) {
    case Route::kPreflight:
      response.status = 204;
      response.headers = {{"Allow", std::string(match.allow)},
                          {"Access-Control-Allow-Methods", std::string(match.allow)},
                          {"Access-Control-Allow-Headers", "*, Authorization"},
                          {"Access-Control-Max-Age", "86400"}};
      break;
    case Route::kModels: response = ListModels(api_.model); break;
    case Route::kModel: response = ShowModel(api_.model, match.argument); break;
    case Route::kExplain: response = Explain(api_.explanations, match.argument); break;
    case Route::kHealth:
    case Route::kPing:
      response = Health(api_.model.engine->stats(), api_.draining, api_.options.unhealthy_after);
      break;
    case Route::kVersion: response.body = fmt::format(R"({{"version":"{}"}})", kVersion); break;
    case Route::kLoad:
      response.body = fmt::format(R"({{"server_load":{}}})", api_.active - 1);  // without this one
      break;
    case Route::kMetrics:
      response.content_type = "text/plain; version=0.0.4; charset=utf-8";
      response.body = api_.metrics.Text();
      break;
    default: response = ErrorResponse(HttpError(404, "there is no such route"));
  }
  return response;
}

asio::awaitable<void> ApiHandler::Handle(Connection& connection, HttpRequest request) {
  const ActiveMark active(api_);
  const RouteMatch match = MatchRoute(request.method, request.path);
  if (match.route == Route::kChatCompletions) {
    co_await Generate(api_, bridge_, connection, std::move(request.body), Dialect::kChat);
  } else if (match.route == Route::kCompletions) {
    co_await Generate(api_, bridge_, connection, std::move(request.body), Dialect::kCompletion);
  } else if (match.route == Route::kTokenize || match.route == Route::kDetokenize) {
    auto work = [&model = api_.model, route = match.route, body = std::move(request.body)] {
      return route == Route::kTokenize ? TokenizeReply(body, model) : DetokenizeReply(body, model);
    };
    HttpResponse response = co_await api_.OnTextPool(std::move(work));
    co_await connection.Send(std::move(response));
  } else {
    HttpResponse response = Short(match);
    co_await connection.Send(std::move(response));
  }
}

}  // namespace fathom
