#include "text/tokenizer_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "text/byte_level.h"
#include "text/utf8.h"

namespace fathom {
namespace {

using Json = nlohmann::json;

// Ids index tables; a file with a stray huge id must not make them huge. Sixteen times the largest
// published vocabulary.
constexpr int64_t kMaxId = (1 << 22) - 1;

// Hugging Face's library adds this regex when ByteLevel says use_regex.
constexpr const char* kGpt2Regex =
    R"re('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)re";

class Reader {
 public:
  explicit Reader(std::string_view origin) : origin_(origin) {}

  Expected<TokenizerFile> Read(const Json& root) {
    if (!root.is_object()) return Broken("top level", "must be an object");
    for (const char* key : {"truncation", "padding"}) {
      if (root.contains(key) && !root[key].is_null()) return Unsupported(key, "must be null");
    }
    FATHOM_TRY(Normalizer(root));
    FATHOM_TRY(PreTokenizer(root));
    FATHOM_TRY(Decoder(root));
    FATHOM_ASSIGN(const Json* model, Object(root, "", "model"));
    FATHOM_TRY(ModelFlags(*model));
    FATHOM_TRY(Vocab(*model));
    FATHOM_TRY(Merges(*model));
    FATHOM_TRY(Added(root));
    return std::move(file_);
  }

  template <class... Args>
  tl::unexpected<Error> Broken(std::string_view key, fmt::format_string<Args...> format,
                               Args&&... args) const {
    return Fail(Code::kDataLoss, "{}: {}: {}", origin_, key,
                fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  tl::unexpected<Error> Unsupported(std::string_view key, fmt::format_string<Args...> format,
                                    Args&&... args) const {
    return Fail(Code::kUnimplemented, "{}: {}: {}", origin_, key,
                fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  static std::string Path(std::string_view parent, std::string_view key) {
    return parent.empty() ? std::string(key) : fmt::format("{}.{}", parent, key);
  }
  // A value as an error message shows it.
  static std::string Show(const Json& value) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() <= 60 ? text : RepairUtf8(text.substr(0, 60)) + "...";
  }

  Expected<const Json*> Object(const Json& parent, std::string_view path, const char* key) const {
    auto it = parent.find(key);
    if (it == parent.end()) return Broken(Path(path, key), "missing");
    if (!it->is_object()) return Broken(Path(path, key), "must be an object, is {}", Show(*it));
    return &*it;
  }
  Expected<std::string> Type(const Json& object, std::string_view path) const {
    if (!object.is_object()) return Broken(path, "must be an object, is {}", Show(object));
    auto it = object.find("type");
    if (it == object.end()) return Broken(Path(path, "type"), "missing");
    if (!it->is_string()) return Broken(Path(path, "type"), "must be a string, is {}", Show(*it));
    return it->get<std::string>();
  }
  Expected<bool> Bool(const Json& object, std::string_view path, const char* key,
                      bool otherwise) const {
    auto it = object.find(key);
    if (it == object.end() || it->is_null()) return otherwise;
    if (!it->is_boolean()) {
      return Broken(Path(path, key), "must be true or false, is {}", Show(*it));
    }
    return it->get<bool>();
  }
  Expected<TokenId> Id(const Json& value, std::string_view path) const {
    if (!value.is_number_integer()) return Broken(path, "must be an integer, is {}", Show(value));
    // An unsigned beyond int64 reads as negative.
    int64_t id = value.get<int64_t>();
    if (id < 0 || id > kMaxId) return Broken(path, "id {} is outside 0..{}", Show(value), kMaxId);
    return static_cast<TokenId>(id);
  }

  Status Normalizer(const Json& root) const {
    auto it = root.find("normalizer");
    if (it == root.end() || it->is_null()) return {};
    FATHOM_ASSIGN(std::string type, Type(*it, "normalizer"));
    auto list = it->find("normalizers");
    if (type == "Sequence" && list != it->end() && list->is_array() && list->empty()) return {};
    return Unsupported("normalizer", "'{}' is not supported; only none", type);
  }

  Status Decoder(const Json& root) const {
    FATHOM_ASSIGN(const Json* decoder, Object(root, "", "decoder"));
    FATHOM_ASSIGN(std::string type, Type(*decoder, "decoder"));
    if (type != "ByteLevel") return Unsupported("decoder.type", "'{}'; only ByteLevel", type);
    return {};
  }

  Status PreTokenizer(const Json& root) {
    FATHOM_ASSIGN(const Json* step, Object(root, "", "pre_tokenizer"));
    FATHOM_TRY(PreTokenizerStep(*step, "pre_tokenizer", 0));
    if (!byte_level_seen_) return Unsupported("pre_tokenizer", "has no ByteLevel step");
    return {};
  }

  Status PreTokenizerStep(const Json& step, const std::string& path, int depth) {
    FATHOM_ASSIGN(std::string type, Type(step, path));
    if (type == "Sequence") {
      auto list = step.find("pretokenizers");
      std::string list_path = path + ".pretokenizers";
      if (list == step.end() || !list->is_array()) return Broken(list_path, "must be an array");
      if (depth == 8) return Unsupported(path, "sequences nested more than 8 deep");
      for (size_t i = 0; i < list->size(); ++i) {
        FATHOM_TRY(PreTokenizerStep((*list)[i], fmt::format("{}[{}]", list_path, i), depth + 1));
      }
      return {};
    }
    // After it the text is no longer text.
    if (byte_level_seen_) return Unsupported(path, "'{}' after ByteLevel", type);
    if (type == "Split") return Split(step, path);
    if (type == "ByteLevel") return ByteLevel(step, path);
    return Unsupported(path + ".type", "'{}'; only Sequence, Split and ByteLevel", type);
  }

  Status Split(const Json& step, const std::string& path) {
    auto behavior = step.find("behavior");
    if (behavior == step.end() || *behavior != "Isolated") {
      return Unsupported(path + ".behavior", "{}; only \"Isolated\"",
                         behavior == step.end() ? "missing" : Show(*behavior));
    }
    // "invert" swaps matches and the text between them, which Isolated treats alike.
    FATHOM_TRY(Bool(step, path, "invert", false));
    FATHOM_ASSIGN(const Json* pattern, Object(step, path, "pattern"));
    std::string pattern_path = path + ".pattern";
    auto regex = pattern->find("Regex");
    auto literal = pattern->find("String");
    if (regex != pattern->end() && regex->is_string()) {
      file_.split_regexes.push_back(regex->get<std::string>());
    } else if (literal != pattern->end() && literal->is_string()) {
      file_.split_regexes.push_back(EscapeRegex(literal->get_ref<const std::string&>()));
    } else {
      return Broken(pattern_path, "must hold a string \"Regex\" or \"String\", is {}",
                    Show(*pattern));
    }
    if (file_.split_regexes.back().empty()) return Broken(pattern_path, "is empty");
    return {};
  }

  static std::string EscapeRegex(const std::string& literal) {
    std::string regex;
    for (char c : literal) {
      if (std::string_view("\\^$.|?*+()[]{}&-").find(c) != std::string_view::npos) regex += '\\';
      regex += c;
    }
    return regex;
  }

  Status ByteLevel(const Json& step, const std::string& path) {
    FATHOM_ASSIGN(bool prefix, Bool(step, path, "add_prefix_space", true));
    if (prefix) return Unsupported(path + ".add_prefix_space", "true is not supported");
    FATHOM_ASSIGN(bool use_regex, Bool(step, path, "use_regex", true));
    if (use_regex) file_.split_regexes.push_back(kGpt2Regex);
    byte_level_seen_ = true;
    return {};
  }

  Status ModelFlags(const Json& model) {
    // Files of 2019 have no type; the library then guesses from the other keys.
    if (model.contains("type")) {
      FATHOM_ASSIGN(std::string type, Type(model, "model"));
      if (type != "BPE") return Unsupported("model.type", "'{}'; only BPE", type);
    }
    auto dropout = model.find("dropout");
    if (dropout != model.end() && !dropout->is_null() && *dropout != 0.0) {
      return Unsupported("model.dropout", "{}; must be null", Show(*dropout));
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      auto it = model.find(key);
      if (it != model.end() && !it->is_null() && *it != "") {
        return Unsupported(Path("model", key), "{}; must be null", Show(*it));
      }
    }
    FATHOM_ASSIGN(file_.ignore_merges, Bool(model, "model", "ignore_merges", false));
    return {};
  }

  Status Vocab(const Json& model) {
    FATHOM_ASSIGN(const Json* vocab, Object(model, "model", "vocab"));
    ids_.reserve(vocab->size());
    for (const auto& [piece, value] : vocab->items()) {
      std::string path = fmt::format("model.vocab['{}']", piece);
      FATHOM_ASSIGN(TokenId id, Id(value, path));
      if (piece.empty()) return Broken("model.vocab", "id {} is an empty piece", id);
      FATHOM_TRY(Name(id, piece, path));
      ids_.emplace(piece, id);
      // Entries that are not written in the byte alphabet, such as control tokens, stand for
      // themselves and are never reached by merging bytes.
      std::optional<std::string> bytes = FromByteAlphabet(piece);
      if (bytes && file_.ignore_merges) file_.whole.emplace(*bytes, id);
      file_.bytes[static_cast<size_t>(id)] = bytes ? *bytes : piece;
    }
    for (size_t b = 0; b < 256; ++b) {
      std::string piece;
      AppendUtf8(piece, ByteAlphabet()[b]);
      auto it = ids_.find(piece);
      if (it == ids_.end()) {
        return Broken("model.vocab", "no entry '{}' for byte 0x{:02X}", piece, b);
      }
      file_.byte_ids[b] = it->second;
    }
    return {};
  }

  // Claims `id` for `piece`.
  Status Name(TokenId id, const std::string& piece, std::string_view path) {
    auto index = static_cast<size_t>(id);
    if (index >= names_.size()) {
      names_.resize(index + 1);
      file_.bytes.resize(index + 1);
    }
    if (!names_[index].empty() && names_[index] != piece) {
      return Broken(path, "id {} is already that of '{}'", id, names_[index]);
    }
    names_[index] = piece;
    return {};
  }

  Status Merges(const Json& model) {
    auto merges = model.find("merges");
    if (merges == model.end()) return Broken("model.merges", "missing");
    if (!merges->is_array()) return Broken("model.merges", "must be an array");
    file_.merges.reserve(merges->size());
    for (size_t i = 0; i < merges->size(); ++i) {
      FATHOM_ASSIGN(auto pair, MergePair((*merges)[i], i));
      Merge merge;
      FATHOM_ASSIGN(merge.left, Piece(pair.first, i));
      FATHOM_ASSIGN(merge.right, Piece(pair.second, i));
      FATHOM_ASSIGN(merge.result, Piece(pair.first + pair.second, i));
      file_.merges.push_back(merge);
    }
    return {};
  }

  Expected<TokenId> Piece(const std::string& piece, size_t i) const {
    auto it = ids_.find(piece);
    if (it == ids_.end()) {
      return Broken(fmt::format("model.merges[{}]", i), "'{}' is not in model.vocab", piece);
    }
    return it->second;
  }

  // Either "left right" or ["left", "right"].
  Expected<std::pair<std::string, std::string>> MergePair(const Json& entry, size_t i) const {
    if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      return std::pair(entry[0].get<std::string>(), entry[1].get<std::string>());
    }
    if (entry.is_string()) {
      const auto& text = entry.get_ref<const std::string&>();
      size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
        return std::pair(text.substr(0, space), text.substr(space + 1));
      }
    }
    return Broken(fmt::format("model.merges[{}]", i),
                  "must be \"left right\" or [\"left\", \"right\"], is {}", Show(entry));
  }

  Status Added(const Json& root) {
    auto tokens = root.find("added_tokens");
    if (tokens == root.end() || tokens->is_null()) return {};
    if (!tokens->is_array()) return Broken("added_tokens", "must be an array");
    std::unordered_set<std::string> contents;
    for (size_t i = 0; i < tokens->size(); ++i) {
      const Json& token = (*tokens)[i];
      std::string path = fmt::format("added_tokens[{}]", i);
      if (!token.is_object()) return Broken(path, "must be an object, is {}", Show(token));
      auto id = token.find("id");
      auto content = token.find("content");
      if (id == token.end()) return Broken(path + ".id", "missing");
      if (content == token.end()) return Broken(path + ".content", "missing");
      AddedToken added;
      FATHOM_ASSIGN(added.id, Id(*id, path + ".id"));
      if (!content->is_string() || content->get_ref<const std::string&>().empty()) {
        return Broken(path + ".content", "must be a string with text, is {}", Show(*content));
      }
      added.content = content->get<std::string>();
      FATHOM_ASSIGN(bool single_word, Bool(token, path, "single_word", false));
      if (single_word) return Unsupported(path + ".single_word", "true is not supported");
      FATHOM_ASSIGN(added.lstrip, Bool(token, path, "lstrip", false));
      FATHOM_ASSIGN(added.rstrip, Bool(token, path, "rstrip", false));
      FATHOM_ASSIGN(added.normalized, Bool(token, path, "normalized", true));
      FATHOM_ASSIGN(added.special, Bool(token, path, "special", false));
      if (!contents.insert(added.content).second) {
        return Broken(path + ".content", "'{}' occurs twice", added.content);
      }
      if (auto it = ids_.find(added.content); it != ids_.end() && it->second != added.id) {
        return Broken(path + ".id", "{}, but model.vocab gives '{}' the id {}", added.id,
                      added.content, it->second);
      }
      FATHOM_TRY(Name(added.id, added.content, path + ".id"));
      file_.bytes[static_cast<size_t>(added.id)] = added.content;
      file_.added.push_back(std::move(added));
    }
    return {};
  }

  std::string_view origin_;
  TokenizerFile file_;
  std::unordered_map<std::string, TokenId> ids_;  // of the vocabulary, by its own spelling
  std::vector<std::string> names_;                // who has each id; empty: nobody
  bool byte_level_seen_ = false;
};

}  // namespace

Expected<TokenizerFile> ParseTokenizerFile(std::string_view json, std::string_view origin) {
  Reader reader(origin);
  try {
    return reader.Read(Json::parse(json));
  } catch (const Json::exception& e) {
    return reader.Broken("not JSON", "{}", e.what());
  }
}

}  // namespace fathom
