#include "api/router.h"

#include <array>

namespace fathom {
namespace {

struct Entry {
  std::string_view path;
  Route route;
  bool get, post;
};

constexpr std::array<Entry, 10> kRoutes = {{
    {"/v1/chat/completions", Route::kChatCompletions, false, true},
    {"/v1/completions", Route::kCompletions, false, true},
    {"/v1/models", Route::kModels, true, false},
    {"/tokenize", Route::kTokenize, false, true},
    {"/detokenize", Route::kDetokenize, false, true},
    {"/health", Route::kHealth, true, false},
    {"/ping", Route::kPing, true, true},
    {"/version", Route::kVersion, true, false},
    {"/metrics", Route::kMetrics, true, false},
    {"/load", Route::kLoad, true, false},
}};

// What follows the prefix is the route's argument.
struct PrefixEntry {
  std::string_view prefix;
  Route route;
};

constexpr std::array<PrefixEntry, 2> kPrefixRoutes = {{
    {"/v1/models/", Route::kModel},
    {"/v1/explain/", Route::kExplain},
}};

}  // namespace

RouteMatch MatchRoute(std::string_view method, std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  Entry found{"", Route::kNotFound, false, false};
  RouteMatch match;
  for (const Entry& entry : kRoutes) {
    if (entry.path == path) found = entry;
  }
  for (const auto& [prefix, route] : kPrefixRoutes) {
    if (path.substr(0, prefix.size()) != prefix) continue;
    found = {path, route, true, false};
    match.argument = path.substr(prefix.size());
  }
  if (found.route == Route::kNotFound) return match;
  match.allow = found.get && found.post ? "GET, HEAD, POST, OPTIONS"
                : found.get             ? "GET, HEAD, OPTIONS"
                                        : "POST, OPTIONS";
  const bool get = method == "GET" || method == "HEAD";
  if (method == "OPTIONS") match.route = Route::kPreflight;
  else if ((get && found.get) || (method == "POST" && found.post)) match.route = found.route;
  else match.route = Route::kMethodNotAllowed;
  return match;
}

bool IsGeneration(Route route) {
  return route == Route::kChatCompletions || route == Route::kCompletions;
}

bool NeedsKey(Route route) {
  switch (route) {
    case Route::kChatCompletions:
    case Route::kCompletions:
    case Route::kModels:
    case Route::kModel:
    case Route::kExplain:
    case Route::kTokenize:
    case Route::kDetokenize: return true;
    default: return false;
  }
}

}  // namespace fathom
