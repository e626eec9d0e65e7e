// Where one request's time and bytes went, and what the prefix cache did for it: the `fathom`
// object of replies that asked for it, and /v1/explain/ID for the last requests.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "engine/request.h"

namespace fathom {

// One choice: its engine report, which is null when the engine gave none.
struct ExplainedChoice {
  std::string finish;  // "stop", "length", "abort", "error"
  int64_t completion_tokens = 0;
  std::shared_ptr<const RequestReport> report;
};

struct Explanation {
  std::string id;          // of the reply: "chatcmpl-..."
  std::string request_id;  // X-Request-Id
  std::string model;
  std::string session;
  int64_t created = 0;  // seconds since 1970
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  std::vector<ExplainedChoice> choices;
};

// The reply's object: what the first choice's report says and, with several choices, `choices` with
// the same fields for each. docs/http.md lists them.
nlohmann::ordered_json ExplanationJson(const std::vector<ExplainedChoice>& choices);

// The last requests, as the JSON that /v1/explain/ID answers. Thread-safe, bounded in number and in
// bytes.
class ExplainLog {
 public:
  static constexpr size_t kRequests = 1024;
  static constexpr size_t kBytes = size_t{16} << 20;

  void Add(const Explanation& explanation);
  // By the reply's id or by the request id, of several with one id the latest; else by the
  // beginning of either, where it is that of one request alone. kNotFound, or kInvalidArgument with
  // the number of requests that begin so.
  Expected<std::string> Find(std::string_view id) const;
  size_t size() const;

 private:
  struct Entry {
    std::string id, request_id, text;
  };
  using Ids = std::unordered_map<std::string, uint64_t>;  // to the number of an entry

  void DropOldest();

  mutable std::mutex mutex_;  // guards all
  std::deque<Entry> entries_;
  uint64_t first_ = 0;  // number of entries_.front()
  size_t bytes_ = 0;
  Ids ids_;
};

}  // namespace fathom
