// Chat encoding of DeepSeek-V4 (model.md 10.3): messages to token ids. Plain conversations in
// thinking and non-thinking mode; tools, tasks and response formats have their place here.
//
// Role markers become token ids directly; message text is encoded with AddedTokens::kInert, so no
// user text ever turns into a control token.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/status.h"
#include "text/tokenizer.h"

namespace fathom {

struct ChatMessage {
  enum class Role { kSystem, kDeveloper, kUser, kAssistant, kTool, kLatestReminder };
  Role role = Role::kUser;
  std::string content;
  std::string reasoning;     // assistant
  std::string tool_call_id;  // tool
};

struct ChatOptions {
  bool thinking = false;
  bool drop_thinking = true;
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the last assistant turn is left open
};

class ChatEncoder {
 public:
  // Finds the control tokens of the vocabulary by content; fails naming the missing one.
  static Expected<ChatEncoder> Make(const Tokenizer& tokenizer);

  // Errors name messages[i].
  Expected<std::vector<TokenId>> Encode(const std::vector<ChatMessage>& messages,
                                        const ChatOptions& options) const;

  TokenId bos() const { return bos_; }
  TokenId eos() const { return eos_; }
  TokenId think_begin() const { return think_begin_; }
  TokenId think_end() const { return think_end_; }

 private:
  const Tokenizer* tokenizer_ = nullptr;
  TokenId bos_ = 0, eos_ = 0, user_ = 0, assistant_ = 0, think_begin_ = 0, think_end_ = 0;
  std::optional<TokenId> latest_reminder_;
};

}  // namespace fathom
