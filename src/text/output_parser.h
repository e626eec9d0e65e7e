// From generated tokens to the fields of a reply: reasoning, content (and later tool calls), with
// stop strings applied to content only. One object per choice; feed tokens in order.
//
//   OutputParser parser(tokenizer, encoder, {.thinking = true, .stop = {"END"}});
//   OutputDelta delta = parser.Push(token);       // delta.reasoning, delta.content
//   if (delta.stopped) engine.Cancel(id);         // nothing after a stop string is ever returned
//   OutputDelta last = parser.Finish();           // flushes held-back text
#pragma once

#include <string>
#include <vector>

#include "core/ids.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace fathom {

struct OutputDelta {
  std::string reasoning;
  std::string content;
  bool stopped = false;  // a stop string was met; stop_string says which
  std::string stop_string;
};

struct OutputParserOptions {
  bool thinking = false;    // generation starts inside <think>
  bool plain_text = false;  // /v1/completions: no reasoning split, control text kept out
  std::vector<std::string> stop;
  bool include_stop_string = false;
  bool skip_special_tokens = true;
};

class OutputParser {
 public:
  OutputParser(const Tokenizer& tokenizer, const ChatEncoder& encoder, OutputParserOptions options);
  OutputDelta Push(TokenId token);
  OutputDelta Finish();
  int64_t reasoning_tokens() const { return reasoning_tokens_; }  // </think> included

 private:
  OutputDelta Emit(std::string text, bool final);
  const ChatEncoder* encoder_;
  OutputParserOptions options_;
  Detokenizer detokenizer_;
  bool in_reasoning_;
  bool stopped_ = false;
  std::string held_;  // content that may be the beginning of a stop string
  int64_t reasoning_tokens_ = 0;
};

}  // namespace fathom
