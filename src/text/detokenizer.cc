#include "text/tokenizer.h"
#include "text/utf8.h"

namespace fathom {

std::string Detokenizer::Push(TokenId id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  std::string bytes = std::move(pending_);
  bytes += tokenizer_->TokenBytes(id);
  size_t complete = bytes.size() - UnfinishedTail(bytes);
  pending_ = bytes.substr(complete);
  bytes.resize(complete);
  return RepairUtf8(bytes);
}

std::string Detokenizer::Finish() {
  std::string rest = RepairUtf8(pending_);
  pending_.clear();
  return rest;
}

}  // namespace fathom
