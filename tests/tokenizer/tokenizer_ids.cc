// tokenizer_ids TOKENIZER.json CORPUS IDS: encodes every document of CORPUS for the oracle test.
//
// CORPUS is documents one after the other, each a little-endian uint32 length and that many bytes
// (any bytes). IDS gets, per document, a uint32 count and that many uint32 ids. Standard output
// gets one line of JSON: bytes, tokens, and the CPU seconds one thread took to encode, reading
// and writing excluded.
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace {

int Fail(const std::string& message) {
  std::fprintf(stderr, "tokenizer_ids: %s\n", message.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return Fail("usage: tokenizer_ids TOKENIZER.json CORPUS IDS");
  auto tokenizer = fathom::Tokenizer::Load(argv[1]);
  if (!tokenizer) return Fail(tokenizer.error().message);

  std::ifstream input(argv[2], std::ios::binary);
  if (!input) return Fail(std::string("cannot open ") + argv[2]);
  const std::string corpus{std::istreambuf_iterator<char>(input), std::istreambuf_iterator<char>()};
  std::vector<std::string_view> documents;
  for (size_t at = 0; at < corpus.size();) {
    uint32_t length = 0;
    if (corpus.size() - at < 4) return Fail("corpus ends inside a length");
    std::memcpy(&length, corpus.data() + at, 4);
    at += 4;
    if (corpus.size() - at < length) return Fail("corpus ends inside a document");
    documents.push_back(std::string_view(corpus).substr(at, length));
    at += length;
  }

  std::vector<std::vector<fathom::TokenId>> ids;
  ids.reserve(documents.size());
  size_t bytes = 0, tokens = 0;
  // CPU time, so that a busy machine does not change the comparison.
  std::clock_t begin = std::clock();
  for (std::string_view document : documents) {
    ids.push_back((*tokenizer)->Encode(document, fathom::AddedTokens::kMatch));
    bytes += document.size();
    tokens += ids.back().size();
  }
  double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;

  std::ofstream output(argv[3], std::ios::binary);
  for (const auto& list : ids) {
    auto count = static_cast<uint32_t>(list.size());
    output.write(reinterpret_cast<const char*>(&count), 4);
    output.write(reinterpret_cast<const char*>(list.data()),
                 static_cast<std::streamsize>(list.size() * 4));
  }
  output.close();
  if (!output) return Fail(std::string("cannot write ") + argv[3]);
  std::printf("{\"bytes\": %zu, \"tokens\": %zu, \"seconds\": %.6f}\n", bytes, tokens, seconds);
  return 0;
}
