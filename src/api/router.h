// Router: method and path to a route.
#pragma once

#include <string_view>

namespace fathom {

enum class Route {
  kNotFound,
  kMethodNotAllowed,  // Match::allow lists the methods
  kPreflight,         // OPTIONS of a known path
  kChatCompletions,
  kCompletions,
  kModels,
  kModel,    // /v1/models/NAME
  kExplain,  // /v1/explain/ID
  kTokenize,
  kDetokenize,
  kHealth,
  kPing,
  kVersion,
  kMetrics,
  kLoad,
};

struct RouteMatch {
  Route route = Route::kNotFound;
  std::string_view allow;     // methods of the path, for Allow
  std::string_view argument;  // NAME of kModel, ID of kExplain
};

// HEAD counts as GET where GET is offered. Trailing slashes are ignored.
RouteMatch MatchRoute(std::string_view method, std::string_view path);

// Routes that make the engine work: streams, watched for disconnects, refused while draining.
bool IsGeneration(Route route);

// Routes that need the API key when one is set: everything but health, ping, version, load and
// metrics, as in vLLM.
bool NeedsKey(Route route);

}  // namespace fathom
