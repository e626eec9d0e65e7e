#include "text/added_tokens.h"

#include <algorithm>

#include "text/unicode_classes.h"
#include "text/utf8.h"

namespace fathom {
namespace {

bool IsSpace(char32_t c) {
  return CharClasses::Get()[c] & kSpace;
}

// Where the white space at the end of `text` begins.
size_t TrailingSpace(std::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    size_t at = begin - 1;
    while (at > 0 && (text[at] & 0xC0) == 0x80) --at;
    if (!IsSpace(DecodeValidUtf8(text.data() + at).value)) break;
    begin = at;
  }
  return begin;
}

// Bytes of white space at the beginning of `text`.
size_t LeadingSpace(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    CodePoint c = DecodeValidUtf8(text.data() + at);
    if (!IsSpace(c.value)) break;
    at += c.length;
  }
  return at;
}

auto FindChild(auto& children, uint8_t byte) {
  return std::lower_bound(children.begin(), children.end(), byte,
                          [](const auto& child, uint8_t b) { return child.first < b; });
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens) {
  for (const AddedToken& token : tokens) {
    (token.normalized ? normalized_ : verbatim_).Insert(token);
  }
}

void AddedTokenMatcher::Trie::Insert(const AddedToken& token) {
  uint32_t node = 0;
  for (char c : token.content) {
    auto byte = static_cast<uint8_t>(c);
    auto it = FindChild(nodes[node].children, byte);
    if (it != nodes[node].children.end() && it->first == byte) {
      node = it->second;
      continue;
    }
    auto child = static_cast<uint32_t>(nodes.size());
    nodes[node].children.insert(it, {byte, child});
    if (node == 0) first[byte] = child;
    nodes.emplace_back();
    node = child;
  }
  nodes[node].rule = Rule{token.id, token.lstrip, token.rstrip};
}

const AddedTokenMatcher::Rule* AddedTokenMatcher::Trie::Longest(std::string_view text,
                                                                size_t* length) const {
  const Rule* best = nullptr;
  uint32_t node = first[static_cast<uint8_t>(text[0])];
  for (size_t i = 1; node != 0; ++i) {
    if (nodes[node].rule) {
      best = &*nodes[node].rule;
      *length = i;
    }
    if (i == text.size()) break;
    auto byte = static_cast<uint8_t>(text[i]);
    auto it = FindChild(nodes[node].children, byte);
    node = it != nodes[node].children.end() && it->first == byte ? it->second : 0;
  }
  return best;
}

void AddedTokenMatcher::Trie::Find(std::string_view text, std::vector<TextSpan>& spans) const {
  size_t done = 0;  // text up to here is in spans
  for (size_t at = 0; at < text.size();) {
    size_t length = 0;
    const Rule* rule = nullptr;
    if (first[static_cast<uint8_t>(text[at])] != 0) rule = Longest(text.substr(at), &length);
    if (rule == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + length;
    if (rule->lstrip) begin = std::clamp(TrailingSpace(text.substr(0, at)), std::min(done, at), at);
    if (rule->rstrip) end += LeadingSpace(text.substr(end));
    if (done < begin) spans.push_back({std::nullopt, text.substr(done, begin - done)});
    spans.push_back({rule->id, text.substr(begin, end - begin)});
    done = end;
    at += length;  // white space swallowed by rstrip may still begin another token
  }
  if (done < text.size()) spans.push_back({std::nullopt, text.substr(done)});
}

std::vector<TextSpan> AddedTokenMatcher::Find(std::string_view text) const {
  std::vector<TextSpan> spans;
  verbatim_.Find(text, spans);
  if (normalized_.empty()) return spans;
  std::vector<TextSpan> result;
  for (const TextSpan& span : spans) {
    if (span.added) {
      result.push_back(span);
    } else {
      normalized_.Find(span.text, result);
    }
  }
  return result;
}

}  // namespace fathom
