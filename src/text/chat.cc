#include "text/chat.h"

#include <algorithm>

namespace fathom {
namespace {

using Role = ChatMessage::Role;

// A message after preparation: tool messages are user text, neighbouring user turns are one.
struct Turn {
  Role role;
  std::string content;
  const std::string* reasoning;  // assistant; null otherwise
  size_t index;                  // of its first message, for error messages

  bool user_like() const { return role == Role::kUser || role == Role::kDeveloper; }
};

std::vector<Turn> FuseTurns(const std::vector<ChatMessage>& messages) {
  std::vector<Turn> turns;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const bool tool = message.role == Role::kTool;
    Role role = tool ? Role::kUser : message.role;
    if (role != Role::kUser || turns.empty() || turns.back().role != Role::kUser) {
      turns.push_back({role, {}, role == Role::kAssistant ? &message.reasoning : nullptr, i});
    } else {
      turns.back().content += "\n\n";
    }
    if (tool) turns.back().content += "<tool_result>";
    turns.back().content += message.content;
    if (tool) turns.back().content += "</tool_result>";
  }
  return turns;
}

// Index of the last user or developer turn; -1 if there is none.
ptrdiff_t LastUserLike(const std::vector<Turn>& turns) {
  auto it = std::find_if(turns.rbegin(), turns.rend(), [](const Turn& t) { return t.user_like(); });
  return turns.rend() - it - 1;
}

size_t LeadingSystems(const std::vector<Turn>& turns) {
  auto other = [](const Turn& t) { return t.role != Role::kSystem; };
  return static_cast<size_t>(std::find_if(turns.begin(), turns.end(), other) - turns.begin());
}

// Developer turns before the last user-like one, which drop_thinking leaves out.
void DropDevelopers(std::vector<Turn>& turns) {
  auto end = turns.begin() + std::max<ptrdiff_t>(LastUserLike(turns), 0);
  turns.erase(
      std::remove_if(turns.begin(), end, [](const Turn& t) { return t.role == Role::kDeveloper; }),
      end);
}

}  // namespace

// One EncodePrompt call: the turns in order, and the prompt so far.
class ChatRenderer {
 public:
  ChatRenderer(const ChatEncoder& encoder, const ChatOptions& options, std::vector<Turn> turns)
      : encoder_(encoder),
        options_(options),
        turns_(std::move(turns)),
        last_user_(LastUserLike(turns_)),
        leading_systems_(LeadingSystems(turns_)) {}

  Expected<ChatPrompt> Run() {
    Token(encoder_.bos_);
    for (size_t i = 0; i < turns_.size(); ++i) FATHOM_TRY(Render(i));
    if (options_.add_generation_prompt && !handed_off_) HandOff(turns_.size());
    Flush();
    return std::move(prompt_);
  }

 private:
  // Text between two control tokens is encoded as a whole, however many messages it comes from.
  void Text(std::string_view text) {
    text_ += text;
    marked_ = marked_ && text.empty();
  }
  void Token(TokenId id) {
    Flush();
    std::vector<int64_t>& boundaries = prompt_.boundaries;
    const int64_t here = static_cast<int64_t>(prompt_.ids.size());
    // BOS alone is not worth a boundary.
    if (marked_ && here > 1 && (boundaries.empty() || boundaries.back() < here)) {
      boundaries.push_back(here);
    }
    marked_ = false;
    prompt_.ids.push_back(id);
  }
  void Flush() {
    if (text_.empty()) return;
    std::vector<TokenId> ids = encoder_.tokenizer_->Encode(text_, AddedTokens::kInert);
    prompt_.ids.insert(prompt_.ids.end(), ids.begin(), ids.end());
    text_.clear();
  }
  // A boundary here, if a control token follows: text would be tokenised together with what stands
  // before it, so that another text need not leave the same ids.
  void Mark() { marked_ = true; }

  // Whether the reasoning of an assistant at index i is part of the prompt.
  bool KeepsReasoning(size_t i) const {
    return options_.thinking && (!options_.drop_thinking || static_cast<ptrdiff_t>(i) > last_user_);
  }

  // The assistant's turn begins after turn i.
  void HandOff(size_t i) {
    Token(encoder_.assistant_);
    bool thinks =
        options_.thinking && (!options_.drop_thinking || static_cast<ptrdiff_t>(i) >= last_user_);
    Token(thinks ? encoder_.think_begin_ : encoder_.think_end_);
    handed_off_ = true;
  }

  bool NextIs(size_t i, Role role) const {
    return i + 1 < turns_.size() && turns_[i + 1].role == role;
  }

  // A system turn inside the conversation with nothing but system turns between it and a reply.
  bool IsReminder(size_t i) const {
    auto begun = [](const Turn& t) { return t.user_like() || t.role == Role::kAssistant; };
    if (std::none_of(turns_.begin(), turns_.begin() + static_cast<ptrdiff_t>(i), begun)) {
      return false;
    }
    while (NextIs(i, Role::kSystem)) ++i;
    return i + 1 == turns_.size() || NextIs(i, Role::kAssistant);
  }

  // After turn i, which asks for a reply.
  void HandOffIfReplyFollows(size_t i) {
    bool last = i + 1 == turns_.size();
    if (last ? options_.add_generation_prompt
             : NextIs(i, Role::kAssistant) || NextIs(i, Role::kLatestReminder)) {
      HandOff(i);
    }
  }

  Status Render(size_t i) {
    const Turn& turn = turns_[i];
    switch (turn.role) {
      case Role::kSystem:
        if (!IsReminder(i)) {
          Text(turn.content);
          handed_off_ = false;
          if (i < leading_systems_) Mark();
          return {};
        }
        Reminder(turn, i);
        if (!NextIs(i, Role::kSystem)) HandOffIfReplyFollows(i);
        return {};
      case Role::kDeveloper:
        if (turn.content.empty()) {
          std::string name = fmt::format("messages[{}].content", turn.index);
          return FailParam(Code::kInvalidArgument, name,
                           "{}: a developer message must not be empty", name);
        }
        [[fallthrough]];
      case Role::kUser:
      case Role::kTool:  // fused into user turns before
        if (static_cast<ptrdiff_t>(i) == last_user_) Mark();
        Token(encoder_.user_);
        Text(turn.content);
        handed_off_ = false;
        HandOffIfReplyFollows(i);
        return {};
      case Role::kLatestReminder:
        if (!encoder_.latest_reminder_) {
          std::string name = fmt::format("messages[{}].role", turn.index);
          return FailParam(Code::kInvalidArgument, name,
                           "{}: this model's vocabulary has no latest_reminder token", name);
        }
        Token(*encoder_.latest_reminder_);
        Text(turn.content);  // a hand-off before it still holds
        return {};
      case Role::kAssistant: Assistant(turn, i); return {};
    }
    return {};
  }

  void Reminder(const Turn& turn, size_t i) {
    if (encoder_.latest_reminder_) {
      Token(*encoder_.latest_reminder_);
    } else if (turns_[i - 1].role != Role::kAssistant) {
      Text("\n\n");
    }
    Text(turn.content);
    handed_off_ = false;
  }

  void Assistant(const Turn& turn, size_t i) {
    const bool open = options_.continue_final_message && i + 1 == turns_.size();
    if (open && !handed_off_) HandOff(i);
    handed_off_ = false;
    if (KeepsReasoning(i)) {
      Text(*turn.reasoning);
      if (open && turn.content.empty()) return;
      Token(encoder_.think_end_);
    }
    Text(turn.content);
    if (!open) Token(encoder_.eos_);
  }

  const ChatEncoder& encoder_;
  const ChatOptions& options_;
  const std::vector<Turn> turns_;
  const ptrdiff_t last_user_;
  const size_t leading_systems_;
  bool handed_off_ = false;  // the assistant's turn has been opened and not yet closed
  bool marked_ = false;      // Mark was called and nothing written since
  std::string text_;
  ChatPrompt prompt_;
};

Expected<ChatEncoder> ChatEncoder::Make(const Tokenizer& tokenizer) {
  ChatEncoder encoder;
  encoder.tokenizer_ = &tokenizer;
  const std::pair<const char*, TokenId*> required[] = {{"<｜begin▁of▁sentence｜>", &encoder.bos_},
                                                       {"<｜end▁of▁sentence｜>", &encoder.eos_},
                                                       {"<｜User｜>", &encoder.user_},
                                                       {"<｜Assistant｜>", &encoder.assistant_},
                                                       {"<think>", &encoder.think_begin_},
                                                       {"</think>", &encoder.think_end_}};
  for (auto [content, id] : required) {
    std::optional<TokenId> found = tokenizer.AddedTokenId(content);
    if (!found) {
      return Fail(Code::kDataLoss, "tokenizer: added_tokens has no '{}', which chat needs",
                  content);
    }
    *id = *found;
  }
  encoder.latest_reminder_ = tokenizer.AddedTokenId("<｜latest_reminder｜>");
  return encoder;
}

Expected<std::vector<TokenId>> ChatEncoder::Encode(const std::vector<ChatMessage>& messages,
                                                   const ChatOptions& options) const {
  FATHOM_ASSIGN(ChatPrompt prompt, EncodePrompt(messages, options));
  return std::move(prompt.ids);
}

Expected<ChatPrompt> ChatEncoder::EncodePrompt(const std::vector<ChatMessage>& messages,
                                               const ChatOptions& options) const {
  if (messages.empty()) {
    return FailParam(Code::kInvalidArgument, "messages", "messages must not be empty");
  }
  if (options.continue_final_message) {
    if (options.add_generation_prompt) {
      return FailParam(Code::kInvalidArgument, "continue_final_message",
                       "continue_final_message and add_generation_prompt contradict each other");
    }
    if (messages.back().role != Role::kAssistant) {
      return FailParam(Code::kInvalidArgument, "continue_final_message",
                       "continue_final_message: messages[{}] is not an assistant message",
                       messages.size() - 1);
    }
  }
  std::vector<Turn> turns = FuseTurns(messages);
  if (options.thinking && options.drop_thinking) DropDevelopers(turns);
  return ChatRenderer(*this, options, std::move(turns)).Run();
}

}  // namespace fathom
