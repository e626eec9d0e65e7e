#include "text/tokenizer.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <unordered_map>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pre_tokenizer.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace fathom {
namespace {

// What a thread keeps between calls: about 1 MiB, for the tokenizer it used last.
struct ThreadState {
  uint64_t owner = 0;
  BpeScratch scratch;
  std::vector<uint32_t> ends;
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerFile file, std::unique_ptr<PreTokenizer> pre_tokenizer)
      : bpe_(file.byte_ids, file.merges, std::move(file.whole)),
        pre_tokenizer_(std::move(pre_tokenizer)),
        matcher_(file.added),
        bytes_(std::move(file.bytes)),
        flags_(bytes_.size(), 0) {
    for (const AddedToken& token : file.added) {
      flags_[static_cast<size_t>(token.id)] = kAdded | (token.special ? kSpecial : 0);
      added_ids_.emplace(token.content, token.id);
    }
  }

  std::vector<TokenId> Encode(std::string_view text, AddedTokens added) const override {
    FATHOM_CHECK(text.size() < uint64_t{1} << 32);
    std::string repaired;
    if (!IsValidUtf8(text)) {
      repaired = RepairUtf8(text);
      text = repaired;
      FATHOM_CHECK(text.size() < uint64_t{1} << 32);
    }
    std::vector<TokenId> ids;
    ids.reserve(text.size() / 4 + 16);
    ThreadState& state = State();
    if (added == AddedTokens::kInert) {
      EncodeText(text, state, ids);
      return ids;
    }
    for (const TextSpan& span : matcher_.Find(text)) {
      if (span.added) {
        ids.push_back(*span.added);
      } else {
        EncodeText(span.text, state, ids);
      }
    }
    return ids;
  }

  std::string Decode(const std::vector<TokenId>& ids, DecodeOptions options) const override {
    std::string bytes;
    for (TokenId id : ids) {
      if (options.skip_special && is_special(id)) continue;
      bytes += TokenBytes(id);
    }
    return RepairUtf8(bytes);
  }

  std::string_view TokenBytes(TokenId id) const override {
    return Known(id) ? std::string_view(bytes_[static_cast<size_t>(id)]) : std::string_view();
  }
  bool is_special(TokenId id) const override {
    return Known(id) && (flags_[static_cast<size_t>(id)] & kSpecial);
  }
  bool is_added(TokenId id) const override {
    return Known(id) && (flags_[static_cast<size_t>(id)] & kAdded);
  }
  std::optional<TokenId> AddedTokenId(std::string_view content) const override {
    auto it = added_ids_.find(std::string(content));
    if (it == added_ids_.end()) return std::nullopt;
    return it->second;
  }
  int64_t vocab_size() const override { return static_cast<int64_t>(bytes_.size()); }

 private:
  enum Flag : uint8_t { kAdded = 1, kSpecial = 2 };

  bool Known(TokenId id) const { return id >= 0 && static_cast<size_t>(id) < bytes_.size(); }

  ThreadState& State() const {
    thread_local ThreadState state;
    if (state.owner != serial_) {
      state.scratch.Clear();
      state.owner = serial_;
    }
    return state;
  }

  void EncodeText(std::string_view text, ThreadState& state, std::vector<TokenId>& ids) const {
    // Cut points of a long text, by the million, are not kept beyond the call.
    constexpr size_t kKeep = 1 << 16;
    state.ends.clear();
    pre_tokenizer_->Split(text, state.ends);
    uint32_t begin = 0;
    for (uint32_t end : state.ends) {
      bpe_.Encode(text.substr(begin, end - begin), state.scratch, ids);
      begin = end;
    }
    if (state.ends.capacity() > kKeep) state.ends = {};
  }

  // Not the address, which a later tokenizer may get again.
  static uint64_t NextSerial() {
    static std::atomic<uint64_t> next{1};
    return next.fetch_add(1);
  }

  const uint64_t serial_ = NextSerial();
  Bpe bpe_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  AddedTokenMatcher matcher_;
  std::vector<std::string> bytes_;  // by id
  std::vector<uint8_t> flags_;      // by id
  std::unordered_map<std::string, TokenId> added_ids_;
};

}  // namespace

Expected<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  // A directory opens like a file and throws only when it is read.
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return Fail(Code::kInvalidArgument, "{}: is a directory", path);
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return Fail(Code::kNotFound, "{}: {}", path, std::strerror(errno));
  std::string json{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) return Fail(Code::kDataLoss, "{}: cannot be read", path);
  return Parse(json, path);
}

Expected<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view json,
                                                      std::string_view origin) {
  FATHOM_ASSIGN(TokenizerFile file, ParseTokenizerFile(json, origin));
  auto pre_tokenizer = MakePreTokenizer(file.split_regexes);
  if (!pre_tokenizer) {
    Error error = std::move(pre_tokenizer.error());
    return Fail(error.code, "{}: pre_tokenizer: {}", origin, error.message);
  }
  return std::make_unique<BpeTokenizer>(std::move(file), std::move(*pre_tokenizer));
}

}  // namespace fathom
