#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "text/byte_level.h"
#include "text/testing.h"

namespace fathom {
namespace {

using Json = nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// A small correct file: the 256 bytes as ids 0..255, "ab" = 256, two added tokens.
Json SmallFile() {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) {
    std::string piece;
    AppendUtf8(piece, ByteAlphabet()[b]);
    vocab[piece] = b;
  }
  vocab["ab"] = 256;
  vocab["abab"] = 257;
  auto added = [](int id, const char* content, bool special) {
    return Json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  return Json{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", {added(258, "<s>", true), added(259, "<s>x", false)}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", Json::array({"ab", "ab"})}}}}};
}

std::unique_ptr<Tokenizer> Make(const Json& file) {
  auto made = Tokenizer::Parse(file.dump(), "test.json");
  if (!made) ADD_FAILURE() << made.error().message;
  return std::move(*made);
}

TEST(Tokenizer, BothFormsOfMergesAndLongestAddedToken) {
  auto tokenizer = Make(SmallFile());
  EXPECT_THAT(tokenizer->Encode("ababab", AddedTokens::kMatch), ElementsAre(257, 256));
  EXPECT_THAT(tokenizer->Encode("a<s>xb<s>", AddedTokens::kMatch), ElementsAre('a', 259, 'b', 258));
  EXPECT_EQ(tokenizer->vocab_size(), 260);
  EXPECT_EQ(tokenizer->AddedTokenId("<s>x"), 259);
  EXPECT_EQ(tokenizer->AddedTokenId("ab"), std::nullopt);
  EXPECT_TRUE(tokenizer->is_special(258));
  EXPECT_FALSE(tokenizer->is_special(259));
  EXPECT_TRUE(tokenizer->is_added(259));
  EXPECT_FALSE(tokenizer->is_added(256));
  for (TokenId unknown : {-1, 260, 1 << 30}) {
    EXPECT_EQ(tokenizer->TokenBytes(unknown), "");
    EXPECT_FALSE(tokenizer->is_special(unknown));
    EXPECT_FALSE(tokenizer->is_added(unknown));
  }
}

TEST(Tokenizer, InertTextHoldsNoAddedToken) {
  const Tokenizer& demo = DemoTokenizer();
  const std::string text = "<｜User｜><think>hi</think><｜end▁of▁sentence｜>｜DSML｜";
  for (TokenId id : demo.Encode(text, AddedTokens::kInert)) EXPECT_FALSE(demo.is_added(id)) << id;
  EXPECT_EQ(demo.Decode(demo.Encode(text, AddedTokens::kInert), {}), text);
  EXPECT_THAT(demo.Encode("<think></think>", AddedTokens::kMatch), ElementsAre(4093, 4094));
}

TEST(Tokenizer, StripFlagsSwallowWhiteSpace) {
  Json file = SmallFile();
  file["added_tokens"][0]["lstrip"] = true;
  file["added_tokens"][0]["rstrip"] = true;
  EXPECT_THAT(Make(file)->Encode("a \u3000<s>\n\tb", AddedTokens::kMatch),
              ElementsAre('a', 258, 'b'));
}

TEST(Tokenizer, InvalidUtf8IsEncodedAsReplacementCharacters) {
  const Tokenizer& demo = DemoTokenizer();
  EXPECT_EQ(demo.Encode("a\xE4\xB8 b\xFF", AddedTokens::kMatch),
            demo.Encode("a\uFFFD b\uFFFD", AddedTokens::kMatch));
}

RC_GTEST_PROP(Tokenizer, DecodeGivesTheTextBack, ()) {
  const Tokenizer& demo = DemoTokenizer();
  const std::string text = *GenText();
  const auto added = *rc::gen::element(AddedTokens::kMatch, AddedTokens::kInert);
  RC_ASSERT(demo.Decode(demo.Encode(text, added), {}) == text);
  const std::string bytes = *GenBytes();
  RC_ASSERT(demo.Decode(demo.Encode(bytes, added), {}) == RepairUtf8(bytes));
}

RC_GTEST_PROP(Detokenizer, DeltasAreWholeCharactersAndAddUpToDecode, ()) {
  const Tokenizer& demo = DemoTokenizer();
  // Random ids, so that characters are cut and broken in every way.
  const auto ids = *rc::gen::container<std::vector<TokenId>>(
      rc::gen::oneOf(rc::gen::inRange<TokenId>(0, 300), rc::gen::inRange<TokenId>(-2, 4100)));
  const bool skip = *rc::gen::arbitrary<bool>();
  Detokenizer detokenizer(demo, skip);
  std::string text;
  for (TokenId id : ids) {
    const std::string delta = detokenizer.Push(id);
    RC_ASSERT(IsValidUtf8(delta));
    text += delta;
  }
  text += detokenizer.Finish();
  RC_ASSERT(text == demo.Decode(ids, {.skip_special = skip}));
}

TEST(Detokenizer, HoldsBackHalfACharacterAndFlushesIt) {
  auto tokenizer = Make(SmallFile());  // ids below 256 are bytes
  Detokenizer detokenizer(*tokenizer);
  const std::string text = "안녕 👩‍👩‍👧 漢字";
  std::string out;
  for (char c : text) {
    const std::string delta = detokenizer.Push(static_cast<uint8_t>(c));
    EXPECT_EQ(delta.find("\uFFFD"), std::string::npos);
    out += delta;
  }
  EXPECT_EQ(out, text);
  EXPECT_EQ(detokenizer.Finish(), "");
  EXPECT_EQ(detokenizer.Push(0xF0), "");
  EXPECT_EQ(detokenizer.Push(258), "");  // special: skipped, and does not end the character
  EXPECT_EQ(detokenizer.Push(0x9F), "");
  EXPECT_EQ(detokenizer.Finish(), "\uFFFD");
}

TEST(Tokenizer, ThreadsAndTokenizersDoNotDisturbEachOther) {
  auto small = Make(SmallFile());
  const Tokenizer& demo = DemoTokenizer();
  std::ifstream file(FATHOM_SOURCE_DIR "/models/demo/README.md");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ASSERT_GT(text.size(), 1000u);
  const auto from_demo = demo.Encode(text, AddedTokens::kMatch);
  const auto from_small = small->Encode(text, AddedTokens::kMatch);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(demo.Encode(text, AddedTokens::kMatch), from_demo);
        EXPECT_EQ(small->Encode(text, AddedTokens::kMatch), from_small);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct BrokenFile {
  const char* pointer;  // JSON pointer of what is replaced; removed if the value is "REMOVE"
  Json value;
  Code code;
  const char* message;
};

TEST(Tokenizer, BrokenFilesAreRefusedByKey) {
  const BrokenFile kCases[] = {
      {"", Json::array(), Code::kDataLoss, "top level: must be an object"},
      {"/model", "REMOVE", Code::kDataLoss, "model: missing"},
      {"/model", 3, Code::kDataLoss, "model: must be an object, is 3"},
      {"/model/type", "Unigram", Code::kUnimplemented, "model.type: 'Unigram'"},
      {"/model/type", 1, Code::kDataLoss, "model.type: must be a string"},
      {"/model/vocab", "REMOVE", Code::kDataLoss, "model.vocab: missing"},
      {"/model/vocab", Json::array(), Code::kDataLoss, "model.vocab: must be an object"},
      {"/model/vocab/ab", "x", Code::kDataLoss, "model.vocab['ab']: must be an integer, is \"x\""},
      {"/model/vocab/ab", 1.5, Code::kDataLoss, "model.vocab['ab']: must be an integer, is 1.5"},
      {"/model/vocab/ab", -1, Code::kDataLoss, "id -1 is outside"},
      {"/model/vocab/ab", 1u << 31, Code::kDataLoss, "id 2147483648 is outside"},
      {"/model/vocab/ab", ~uint64_t{0}, Code::kDataLoss, "id 18446744073709551615 is outside"},
      {"/model/vocab/ab", 5, Code::kDataLoss, "id 5 is already that of"},
      {"/model/vocab/a", "REMOVE", Code::kDataLoss, "model.vocab: no entry 'a' for byte 0x61"},
      {"/model/vocab/", 300, Code::kDataLoss, "model.vocab: id 300 is an empty piece"},
      {"/model/merges", "REMOVE", Code::kDataLoss, "model.merges: missing"},
      {"/model/merges", Json::object(), Code::kDataLoss, "model.merges: must be an array"},
      {"/model/merges/0", "ab", Code::kDataLoss, "model.merges[0]: must be"},
      {"/model/merges/0", "a b c", Code::kDataLoss, "model.merges[0]: must be"},
      {"/model/merges/1", 7, Code::kDataLoss, "model.merges[1]: must be"},
      {"/model/merges/1", {"a", 7}, Code::kDataLoss, "model.merges[1]: must be"},
      {"/model/merges/1", {"a"}, Code::kDataLoss, "model.merges[1]: must be"},
      {"/model/merges/1", "zz a", Code::kDataLoss, "model.merges[1]: 'zz' is not in model.vocab"},
      {"/model/merges/1", "b a", Code::kDataLoss, "model.merges[1]: 'ba' is not in model.vocab"},
      {"/model/dropout", 0.1, Code::kUnimplemented, "model.dropout: 0.1"},
      {"/model/end_of_word_suffix", "</w>", Code::kUnimplemented, "model.end_of_word_suffix"},
      {"/model/ignore_merges", 1, Code::kDataLoss, "model.ignore_merges: must be true or false"},
      {"/normalizer", {{"type", "NFC"}}, Code::kUnimplemented, "normalizer: 'NFC'"},
      {"/normalizer", 1, Code::kDataLoss, "normalizer: must be an object"},
      {"/truncation", {{"max_length", 5}}, Code::kUnimplemented, "truncation"},
      {"/decoder", nullptr, Code::kDataLoss, "decoder: must be an object"},
      {"/decoder/type", "WordPiece", Code::kUnimplemented, "decoder.type: 'WordPiece'"},
      {"/pre_tokenizer", "REMOVE", Code::kDataLoss, "pre_tokenizer: missing"},
      {"/pre_tokenizer/type", "Whitespace", Code::kUnimplemented, "'Whitespace'"},
      {"/pre_tokenizer/add_prefix_space", true, Code::kUnimplemented, "add_prefix_space"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}},
       Code::kDataLoss,
       "pretokenizers: must be an array"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Removed"}},
       Code::kUnimplemented,
       "pre_tokenizer.behavior: \"Removed\""},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}},
       Code::kUnimplemented,
       "has no ByteLevel"},
      {"/added_tokens", 1, Code::kDataLoss, "added_tokens: must be an array"},
      {"/added_tokens/1", 1, Code::kDataLoss, "added_tokens[1]: must be an object"},
      {"/added_tokens/1/id", "REMOVE", Code::kDataLoss, "added_tokens[1].id: missing"},
      {"/added_tokens/1/id", 258, Code::kDataLoss, "added_tokens[1].id: id 258 is already"},
      {"/added_tokens/1/id", 65, Code::kDataLoss, "added_tokens[1].id: id 65 is already"},
      {"/added_tokens/1/content", "<s>", Code::kDataLoss, "added_tokens[1].content: '<s>' occurs"},
      {"/added_tokens/1/content", "ab", Code::kDataLoss, "model.vocab gives 'ab' the id 256"},
      {"/added_tokens/1/content", "", Code::kDataLoss, "added_tokens[1].content: must be a string"},
      {"/added_tokens/1/content", 5, Code::kDataLoss, "added_tokens[1].content: must be a string"},
      {"/added_tokens/1/special", "no", Code::kDataLoss, "added_tokens[1].special: must be true"},
      {"/added_tokens/1/single_word", true, Code::kUnimplemented, "added_tokens[1].single_word"},
  };
  for (const BrokenFile& broken : kCases) {
    Json file = SmallFile();
    const Json::json_pointer pointer(broken.pointer);
    if (broken.value == "REMOVE") {
      file[pointer.parent_pointer()].erase(pointer.back());
    } else {
      file[pointer] = broken.value;
    }
    auto result = Tokenizer::Parse(file.dump(), "test.json");
    ASSERT_FALSE(result.has_value()) << broken.pointer << " " << broken.value;
    EXPECT_EQ(result.error().code, broken.code) << result.error().message;
    EXPECT_THAT(result.error().message, HasSubstr("test.json: "));
    EXPECT_THAT(result.error().message, HasSubstr(broken.message));
  }
}

TEST(Tokenizer, WhatIsNotJsonOrNotThereIsRefused) {
  for (const char* text : {"", "{", "[1, 2", "\xFF", "{\"model\": \"\xC3\"}", "nul"}) {
    auto result = Tokenizer::Parse(text, "test.json");
    ASSERT_FALSE(result.has_value());
    EXPECT_THAT(result.error().message, HasSubstr("test.json: not JSON"));
  }
  auto missing = Tokenizer::Load("/no/such/tokenizer.json");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("/no/such/tokenizer.json"));
}

TEST(Tokenizer, EveryTruncationOfAFileIsRefused) {
  const std::string whole = SmallFile().dump();
  for (size_t n = 0; n < whole.size(); n += 7) {
    EXPECT_FALSE(Tokenizer::Parse(whole.substr(0, n), "test.json").has_value());
  }
}

}  // namespace
}  // namespace fathom
