// Chat encoding of DeepSeek-V4 (model.md 10.3): messages to token ids. Plain conversations in
// thinking and non-thinking mode; tools, tasks and response formats have their place here.
//
//   FATHOM_ASSIGN(ChatEncoder encoder, ChatEncoder::Make(*tokenizer));
//   auto ids = encoder.Encode({{.role = ChatMessage::Role::kUser, .content = "Hello"}}, {});
//
// Role markers become token ids directly; message text is encoded with AddedTokens::kInert, so no
// user text ever turns into a control token. BOS is written here and only here.
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
  // In thinking mode: assistants before the last user or developer turn lose their reasoning, and
  // developer turns before it are left out.
  bool drop_thinking = true;
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the last assistant turn is left open
};

// A rendered conversation.
struct ChatPrompt {
  std::vector<TokenId> ids;  // BOS first
  // Where other prompts are likely to part from this one, increasing, each in (1, ids.size()): the
  // number of ids that stay the same when
  // - the system messages at the beginning are followed by another conversation,
  // - the last user turn is another one.
  // A prefix cache does well to make these positions resumable besides the prompt's last token,
  // which is where the next prompt parts from one that ends in <think>.
  std::vector<int64_t> boundaries;
};

// Holds no text of its own: the tokenizer must outlive it. Immutable, thread-safe, cheap to copy.
class ChatEncoder {
 public:
  // Finds the control tokens of the vocabulary by content; fails naming the missing one.
  static Expected<ChatEncoder> Make(const Tokenizer& tokenizer);

  // Renders as model.md 10.3 says, and beyond it:
  // - A system message between a user turn and the reply to it (or after everything) would stand
  //   behind the hand-off, where the model continues it. It is rendered before the hand-off as a
  //   reminder: the latest_reminder token and its text, or, in a vocabulary without that token, a
  //   further paragraph of the user turn.
  // - add_generation_prompt always ends in a hand-off (Assistant and a think marker), also after an
  //   assistant or system message; without it none is written at the end.
  // - continue_final_message leaves out the last EOS. With reasoning and no content the reasoning
  //   is left open as well.
  // Errors are kInvalidArgument and name messages[i] or the contradicting option.
  Expected<ChatPrompt> EncodePrompt(const std::vector<ChatMessage>& messages,
                                    const ChatOptions& options) const;
  // The ids alone.
  Expected<std::vector<TokenId>> Encode(const std::vector<ChatMessage>& messages,
                                        const ChatOptions& options) const;

  TokenId bos() const { return bos_; }
  TokenId eos() const { return eos_; }
  TokenId user() const { return user_; }
  TokenId assistant() const { return assistant_; }
  TokenId think_begin() const { return think_begin_; }
  TokenId think_end() const { return think_end_; }

 private:
  friend class ChatRenderer;
  const Tokenizer* tokenizer_ = nullptr;
  TokenId bos_ = 0, eos_ = 0, user_ = 0, assistant_ = 0, think_begin_ = 0, think_end_ = 0;
  std::optional<TokenId> latest_reminder_;
};

}  // namespace fathom
