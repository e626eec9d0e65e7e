#include "api/unsupported_fields.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_set>

#include "core/log.h"

namespace fathom {
namespace {

using nlohmann::json;

// What else than null leaves the reply as it is.
enum class Neutral {
  kNull,       // nothing: also an empty list or an empty schema would constrain it
  kEmpty,      // "", []
  kFalse,      // false
  kTrue,       // true, the default
  kTextAlone,  // ["text"]
};

struct Unsupported {
  const char* name;
  Neutral neutral;
  const char* what;
};

constexpr std::array<Unsupported, 16> kEverywhere = {{
    {"structured_outputs", Neutral::kNull, "(structured output) is not offered"},
    {"guided_json", Neutral::kNull, "(structured output) is not offered"},
    {"guided_regex", Neutral::kNull, "(structured output) is not offered"},
    {"guided_choice", Neutral::kNull, "(structured output) is not offered"},
    {"guided_grammar", Neutral::kNull, "(structured output) is not offered"},
    {"guided_json_object", Neutral::kFalse, "(structured output) is not offered"},
    {"structural_tag", Neutral::kNull, "(structured output) is not offered"},
    {"use_beam_search", Neutral::kFalse, "is not offered"},
    {"allowed_token_ids", Neutral::kNull, "is not offered; logit_bias is"},
    {"bad_words", Neutral::kEmpty, "is not offered; logit_bias is"},
    {"logits_processors", Neutral::kEmpty, "is not offered"},
    {"truncate_prompt_tokens", Neutral::kNull, "is not offered: shorten the prompt"},
    {"prompt_embeds", Neutral::kNull, "is not offered; prompt is"},
    {"thinking_token_budget", Neutral::kNull, "is not offered; max_tokens is"},
    {"modalities", Neutral::kTextAlone, "other than [\"text\"] is not offered"},
    {"audio", Neutral::kNull, "is not offered: this model answers in text"},
}};

constexpr std::array<Unsupported, 5> kInChat = {{
    {"chat_template", Neutral::kEmpty, "is not offered: the model's own template is used"},
    {"documents", Neutral::kEmpty, "is not offered: put them into a message"},
    {"add_special_tokens", Neutral::kFalse, "is not offered in chats: the template adds BOS"},
    {"include_reasoning", Neutral::kTrue, "cannot be false: replies show their reasoning"},
    {"web_search_options", Neutral::kNull, "(web search) is not offered"},
}};

bool IsNeutral(const json& value, Neutral neutral) {
  switch (neutral) {
    case Neutral::kNull: return false;
    case Neutral::kEmpty: return value == "" || value == json::array();
    case Neutral::kFalse: return value == false;
    case Neutral::kTrue: return value == true;
    case Neutral::kTextAlone: return value == json::array({"text"});
  }
  return false;
}

template <size_t n>
void RefuseAll(FieldReader& fields, const std::array<Unsupported, n>& list) {
  for (const auto& [name, neutral, what] : list) {
    const json* value = fields.Find(name);
    if (value == nullptr || IsNeutral(*value, neutral)) continue;
    fields.Refuse(name, what, Code::kUnimplemented);
  }
}

// A client's text as one short line of the log.
std::string Shown(std::string_view name) {
  constexpr size_t kShown = 64;
  std::string shown(name.substr(0, kShown));
  std::replace_if(
      shown.begin(), shown.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
  if (name.size() > kShown) shown += "...";
  return shown;
}

}  // namespace

void RefuseUnsupported(FieldReader& fields) {
  if (const json* format = fields.Object("response_format"); format != nullptr) {
    const auto type = format->find("type");
    if (type == format->end() || !type->is_string()) {
      fields.Refuse("response_format", "needs a string 'type'");
    } else if (*type != "text") {
      fields.Refuse("response_format",
                    fmt::format("of type '{}' is not offered; 'text' is", type->get<std::string>()),
                    Code::kUnimplemented);
    }
  }
  RefuseAll(fields, kEverywhere);
}

void RefuseUnsupportedInChat(FieldReader& fields) {
  RefuseAll(fields, kInChat);
}

void LogIgnoredFields(const FieldReader& fields) {
  if (!Log().should_log(spdlog::level::debug)) return;
  constexpr size_t kNames = 256;
  static std::mutex mutex;
  static std::unordered_set<std::string> seen;
  for (const std::string_view name : fields.Unread()) {
    std::string shown = Shown(name);
    const std::lock_guard lock(mutex);
    if (seen.size() >= kNames || !seen.insert(shown).second) continue;
    Log().debug("ignored field '{}'", shown);
  }
}

}  // namespace fathom
