#include "text/output_parser.h"

#include <utility>

namespace fathom {
namespace {

// Control tokens without the special flag: "<｜...｜>", "｜DSML｜", "<|...|>".
bool LooksLikeControl(std::string_view content) {
  return content.find("｜") != std::string_view::npos ||
         (content.starts_with("<|") && content.ends_with("|>"));
}

}  // namespace

OutputParser::OutputParser(const Tokenizer& tokenizer, const ChatEncoder& encoder,
                           OutputParserOptions options)
    : tokenizer_(&tokenizer),
      encoder_(&encoder),
      options_(std::move(options)),
      detokenizer_(tokenizer, /*skip_special=*/false),  // Hides has decided before
      spelled_think_end_({"</think>"}),
      stops_(options_.stop),
      in_reasoning_(options_.thinking && !options_.plain_text) {}

bool OutputParser::IsRoleOrThinkToken(TokenId token) const {
  return token == encoder_->bos() || token == encoder_->eos() || token == encoder_->user() ||
         token == encoder_->assistant() || token == encoder_->think_begin() ||
         token == encoder_->think_end();
}

bool OutputParser::Hides(TokenId token) const {
  if (!tokenizer_->is_added(token)) return false;
  if (IsRoleOrThinkToken(token)) return !options_.plain_text || options_.skip_special_tokens;
  return options_.skip_special_tokens &&
         (tokenizer_->is_special(token) || LooksLikeControl(tokenizer_->TokenBytes(token)));
}

OutputDelta OutputParser::Push(TokenId token) {
  OutputDelta delta;
  if (stops_.stopped()) {
    delta.stopped = true;
    delta.stop_string = stops_.stop_string();
    return delta;
  }
  if (ended_) return delta;
  if (token == encoder_->eos() && !options_.ignore_eos) {
    ended_ = true;
    return delta;
  }
  if (in_reasoning_) ++reasoning_tokens_;
  if (!options_.plain_text && token == encoder_->think_end() && in_reasoning_) {
    EndReasoning(delta);
  } else if (!options_.plain_text && token == encoder_->think_begin() && blank_ && !in_reasoning_) {
    in_reasoning_ = true;  // the model thinks though it was not asked to
    ++reasoning_tokens_;
  } else if (!Hides(token)) {
    blank_ = false;
    AddText(detokenizer_.Push(token), delta);
  }
  return delta;
}

OutputDelta OutputParser::Finish() {
  OutputDelta delta;
  ended_ = true;
  if (!stops_.stopped()) {
    AddText(detokenizer_.Finish(), delta);
    if (in_reasoning_) delta.reasoning += spelled_think_end_.Finish();
    DeliverContent(stops_.Finish(), delta);
  }
  delta.stopped = stops_.stopped();
  delta.stop_string = stops_.stop_string();
  return delta;
}

void OutputParser::EndReasoning(OutputDelta& delta) {
  AddText(detokenizer_.Finish(), delta);
  if (!in_reasoning_) return;  // that text completed a spelled </think>
  delta.reasoning += spelled_think_end_.Finish();
  in_reasoning_ = false;
  blank_ = false;
}

void OutputParser::AddText(const std::string& text, OutputDelta& delta) {
  if (text.empty()) return;
  if (!in_reasoning_) return AddContent(text, delta);
  delta.reasoning += spelled_think_end_.Push(text);
  if (!spelled_think_end_.stopped()) return;
  in_reasoning_ = false;
  AddContent(spelled_think_end_.rest(), delta);
}

void OutputParser::AddContent(const std::string& text, OutputDelta& delta) {
  DeliverContent(stops_.Push(text), delta);
}

// `text` has passed the stop strings.
void OutputParser::DeliverContent(const std::string& text, OutputDelta& delta) {
  delta.content += text;
  if (!stops_.stopped() || stop_reported_) return;
  stop_reported_ = true;
  if (options_.include_stop_string) delta.content += stops_.stop_string();
  delta.stopped = true;
  delta.stop_string = stops_.stop_string();
}

}  // namespace fathom
