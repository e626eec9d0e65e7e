#include "api/explanation.h"

#include <set>

#include "api/json_text.h"

namespace fathom {
namespace {

using nlohmann::ordered_json;

ordered_json ReportJson(const RequestReport& report) {
  const PrefixReport& prefix = report.prefix;
  ordered_json json;
  json["prompt_tokens"] = prefix.prompt_tokens;
  json["tokens_matched"] = prefix.matched_tokens;
  json["blocks_matched"] = prefix.matched_blocks;
  json["boundary"] = prefix.boundary;
  json["tokens_recomputed"] = std::max<int64_t>(0, prefix.matched_tokens - prefix.boundary);
  json["tokens_rebuilt"] = prefix.rebuilt;
  json["tokens_by_source"] = {{"computed", prefix.prompt_tokens - prefix.boundary},
                              {"device", prefix.device_tokens},
                              {"host", prefix.host_tokens},
                              {"disk", prefix.disk_tokens}};
  json["reason"] = prefix.Reason();
  json["reason_code"] = MissReasonName(prefix.reason);
  json["seconds"] = {{"queue", report.queue_seconds},
                     {"prefill", report.prefill_seconds},
                     {"decode", report.decode_seconds}};
  json["preemptions"] = report.preemptions;
  json["tokens_recomputed_after_preemption"] = report.recomputed_tokens;
  ordered_json bytes;
  for (size_t i = 0; i < report.bytes.size(); ++i) {
    bytes[std::string(CacheKindName(static_cast<CacheKind>(i)))] = report.bytes[i];
  }
  json["bytes"] = std::move(bytes);
  return json;
}

ordered_json ChoiceJson(const ExplainedChoice& choice) {
  ordered_json json =
      choice.report != nullptr ? ReportJson(*choice.report) : ordered_json::object();
  json["completion_tokens"] = choice.completion_tokens;
  json["finish_reason"] = choice.finish;
  return json;
}

}  // namespace

ordered_json ExplanationJson(const std::vector<ExplainedChoice>& choices) {
  if (choices.empty()) return ordered_json::object();
  ordered_json json = ChoiceJson(choices.front());
  if (choices.size() == 1) return json;
  ordered_json list = ordered_json::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    ordered_json entry = {{"index", i}};
    entry.update(ChoiceJson(choices[i]));
    list.push_back(std::move(entry));
  }
  json["choices"] = std::move(list);
  return json;
}

void ExplainLog::Add(const Explanation& explanation) {
  ordered_json json;
  json["id"] = explanation.id;
  json["request_id"] = explanation.request_id;
  json["model"] = explanation.model;
  json["created"] = explanation.created;
  if (!explanation.session.empty()) json["session"] = explanation.session;
  json["usage"] = {{"prompt_tokens", explanation.prompt_tokens},
                   {"cached_tokens", explanation.cached_tokens},
                   {"completion_tokens", explanation.completion_tokens}};
  json["fathom"] = ExplanationJson(explanation.choices);
  Entry entry{explanation.id, explanation.request_id, DumpJson(json)};

  const std::lock_guard lock(mutex_);
  bytes_ += entry.text.size();
  const uint64_t number = first_ + entries_.size();
  ids_[entry.id] = number;
  ids_[entry.request_id] = number;
  entries_.push_back(std::move(entry));
  while (entries_.size() > 1 && (entries_.size() > kRequests || bytes_ > kBytes)) DropOldest();
}

void ExplainLog::DropOldest() {
  const Entry& oldest = entries_.front();
  for (const std::string& id : {oldest.id, oldest.request_id}) {
    const auto known = ids_.find(id);
    if (known != ids_.end() && known->second == first_) ids_.erase(known);
  }
  bytes_ -= oldest.text.size();
  entries_.pop_front();
  ++first_;
}

Expected<std::string> ExplainLog::Find(std::string_view id) const {
  const std::lock_guard lock(mutex_);
  const auto text_of = [&](uint64_t number) { return entries_[number - first_].text; };
  if (const auto known = ids_.find(std::string(id)); known != ids_.end()) {
    return text_of(known->second);
  }
  std::set<uint64_t> begin_so;
  for (const auto& [key, number] : ids_) {
    if (!id.empty() && key.starts_with(id)) begin_so.insert(number);
  }
  if (begin_so.size() == 1) return text_of(*begin_so.begin());
  if (!begin_so.empty()) {
    return Fail(Code::kInvalidArgument, "'{}' is the beginning of {} requests' ids; say more of it",
                id, begin_so.size());
  }
  return Fail(Code::kNotFound,
              "there is no explanation of '{}'; the last {} requests are kept, {} are there", id,
              kRequests, entries_.size());
}

size_t ExplainLog::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace fathom
