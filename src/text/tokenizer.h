// Tokenizer: byte-level BPE read from tokenizer.json (model.md 10.1). Immutable and thread-safe
// after loading.
//
//   auto tokenizer = Tokenizer::Load("models/demo/tokenizer.json");
//   std::vector<TokenId> ids = (*tokenizer)->Encode("a file", AddedTokens::kMatch);
//   std::string text = (*tokenizer)->Decode(ids, {});
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/ids.h"
#include "core/status.h"

namespace fathom {

// Whether added tokens ("<｜User｜>", ...) are recognised in the text. Text from users is encoded
// with kInert, so that it never becomes a control token.
enum class AddedTokens { kMatch, kInert };

class Tokenizer {
 public:
  // A file that is missing is kNotFound, broken kDataLoss, beyond byte-level BPE kUnimplemented;
  // the message names the file and the key. `origin` stands for the file's name.
  static Expected<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  static Expected<std::unique_ptr<Tokenizer>> Parse(std::string_view json, std::string_view origin);
  virtual ~Tokenizer() = default;

  // Ids of `text`, which is any bytes under 4 GiB; nothing is added around them. Hugging Face's
  // library takes valid UTF-8 only, so its callers decode first; the same happens here: each
  // ill-formed part becomes U+FFFD (utf8.h), and the ids are those of the repaired text.
  virtual std::vector<TokenId> Encode(std::string_view text, AddedTokens added) const = 0;

  struct DecodeOptions {
    bool skip_special = false;  // leave out tokens flagged special=true
  };
  // The bytes of all ids in a row as text; ill-formed UTF-8 becomes U+FFFD, unknown ids nothing.
  virtual std::string Decode(const std::vector<TokenId>& ids, DecodeOptions options) const = 0;

  // The raw bytes a token stands for (added tokens: their content). Empty for unknown ids.
  virtual std::string_view TokenBytes(TokenId id) const = 0;
  virtual bool is_special(TokenId id) const = 0;  // added with special=true
  virtual bool is_added(TokenId id) const = 0;
  virtual std::optional<TokenId> AddedTokenId(std::string_view content) const = 0;
  virtual int64_t vocab_size() const = 0;  // largest id + 1
};

// Incremental detokenisation of one stream: Push returns the text that became complete and never
// ends inside a character; Finish flushes what is left (U+FFFD for an incomplete rest).
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}
  std::string Push(TokenId id);
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string pending_;  // at most 3 bytes of an unfinished character
};

}  // namespace fathom
