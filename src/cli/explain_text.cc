#include "cli/explain_text.h"

#include <ctime>

#include "core/amounts.h"

namespace fathom {
namespace {

using nlohmann::json;

std::string Tokens(const json& value) {
  const auto count = value.template get<int64_t>();
  return Grouped(count) + (count == 1 ? " token" : " tokens");
}

std::string Seconds(const json& value) {
  return fmt::format("{:.3f} s", value.get<double>());
}

std::string UtcTime(int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[64];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

// "name   text" under a name column.
void Line(std::string* out, std::string_view name, std::string_view text) {
  *out += fmt::format("{:<16} {}\n", name, text);
}

// What is not 0 of an object of numbers, one a line, the first beside `name`.
template <class Show>
void Amounts(std::string* out, std::string_view name, const json& object, const Show& show) {
  for (const auto& [key, value] : object.items()) {
    if (value.template get<int64_t>() == 0) continue;
    Line(out, name, fmt::format("{:<12} {}", key, show(value.template get<int64_t>())));
    name = "";
  }
}

void AddChoice(const json& choice, std::string* out) {
  Line(out, "finish",
       fmt::format("{} after {}", choice.at("finish_reason").get<std::string>(),
                   Tokens(choice.at("completion_tokens"))));
  if (!choice.contains("seconds")) {
    Line(out, "", "the engine gave no report");
    return;
  }
  Line(out, "prompt", Tokens(choice.at("prompt_tokens")));
  Line(out, "cached prefix",
       fmt::format("{} agree, {} whole blocks", Tokens(choice.at("tokens_matched")),
                   Grouped(choice.at("blocks_matched").get<int64_t>())));
  Line(out, "resumed at",
       fmt::format("{}; {} of the prefix recomputed", Tokens(choice.at("boundary")),
                   Tokens(choice.at("tokens_recomputed"))));
  if (choice.at("tokens_rebuilt").get<int64_t>() > 0) {
    Line(out, "",
         fmt::format("{} of them for their windows alone", Tokens(choice.at("tokens_rebuilt"))));
  }
  Line(out, "why not longer",
       fmt::format("{} ({})", choice.at("reason").get<std::string>(),
                   choice.at("reason_code").get<std::string>()));
  Amounts(out, "prompt from", choice.at("tokens_by_source"),
          [](int64_t count) { return Tokens(json(count)); });
  const json& seconds = choice.at("seconds");
  Line(out, "time",
       fmt::format("queue {}, prefill {}, decode {}", Seconds(seconds.at("queue")),
                   Seconds(seconds.at("prefill")), Seconds(seconds.at("decode"))));
  if (choice.at("preemptions").get<int64_t>() > 0) {
    Line(out, "preempted",
         fmt::format("{} times, {} computed again", choice.at("preemptions").get<int64_t>(),
                     Tokens(choice.at("tokens_recomputed_after_preemption"))));
  }
  Amounts(out, "cache", choice.at("bytes"), BytesAndAmount);
}

}  // namespace

Expected<std::string> ExplainText(const json& entry) {
  try {
    std::string out;
    Line(&out, "request",
         fmt::format("{} (X-Request-Id {})", entry.at("id").get<std::string>(),
                     entry.at("request_id").get<std::string>()));
    Line(&out, "model", entry.at("model").get<std::string>());
    Line(&out, "received", UtcTime(entry.at("created").get<int64_t>()));
    if (entry.contains("session")) Line(&out, "session", entry.at("session").get<std::string>());
    const json& explained = entry.at("fathom");
    const auto choices = explained.find("choices");
    if (choices == explained.end()) {
      AddChoice(explained, &out);
      return out;
    }
    for (const json& choice : *choices) {
      out += fmt::format("\nchoice {}\n", choice.at("index").get<int64_t>());
      AddChoice(choice, &out);
    }
    return out;
  } catch (const json::exception& error) {
    return Fail(Code::kDataLoss, "the server's explanation is not of the form expected: {}",
                error.what());
  }
}

}  // namespace fathom
