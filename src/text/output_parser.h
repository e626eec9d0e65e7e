// From generated tokens to the fields of a reply: reasoning, content (and later tool calls), with
// stop strings applied to content only. One object per choice; feed tokens in order. The tokenizer
// and the encoder must outlive it.
//
//   OutputParser parser(tokenizer, encoder, {.thinking = true, .stop = {"END"}});
//   OutputDelta delta = parser.Push(token);       // delta.reasoning, delta.content
//   if (delta.stopped) engine.Cancel(id);         // nothing after a stop string is ever returned
//   OutputDelta last = parser.Finish();           // flushes held-back text
//
// The deltas of a reply, concatenated field by field, depend on its tokens alone, and every delta
// ends at a character. A reply passes these stages:
//
//   token filter    control tokens are acted upon or dropped, so their text is in no field
//   detokenizer     bytes to whole characters
//   reasoning       up to </think>: the token, or its text spelled with ordinary tokens
//   (tool calls)    a DSML parser belongs into OutputParser::AddContent: it takes the content as it
//                   arrives, keeps what is part of a block and hands prose on. The token filter
//                   must then let ｜DSML｜ pass as text, see Hides.
//   stop strings    on what is left of the content
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/ids.h"
#include "text/chat.h"
#include "text/stop_matcher.h"
#include "text/tokenizer.h"

namespace fathom {

struct OutputDelta {
  std::string reasoning;
  std::string content;
  bool stopped = false;  // a stop string was met, now or before; stop_string says which
  std::string stop_string;
};

struct OutputParserOptions {
  bool thinking = false;    // generation starts inside <think>
  bool plain_text = false;  // /v1/completions: no reasoning split, control text kept out
  std::vector<std::string> stop;
  bool include_stop_string = false;
  // False: the text of added tokens is shown, except for what ends or divides a chat reply.
  bool skip_special_tokens = true;
  bool ignore_eos = false;  // text continues after EOS; otherwise it ends there
};

class OutputParser {
 public:
  OutputParser(const Tokenizer& tokenizer, const ChatEncoder& encoder, OutputParserOptions options);
  OutputDelta Push(TokenId token);
  OutputDelta Finish();
  int64_t reasoning_tokens() const { return reasoning_tokens_; }  // </think> included

 private:
  bool Hides(TokenId token) const;
  bool IsRoleOrThinkToken(TokenId token) const;
  void AddText(const std::string& text, OutputDelta& delta);
  void AddContent(const std::string& text, OutputDelta& delta);
  void DeliverContent(const std::string& text, OutputDelta& delta);
  void EndReasoning(OutputDelta& delta);

  const Tokenizer* tokenizer_;
  const ChatEncoder* encoder_;
  OutputParserOptions options_;
  Detokenizer detokenizer_;
  StopMatcher spelled_think_end_;  // in reasoning
  StopMatcher stops_;              // in content
  bool in_reasoning_;
  bool blank_ = true;   // nothing but control tokens so far
  bool ended_ = false;  // EOS was met, or Finish called
  bool stop_reported_ = false;
  int64_t reasoning_tokens_ = 0;
};

}  // namespace fathom
