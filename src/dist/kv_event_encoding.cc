#include "dist/kv_event_encoding.h"

#include <nlohmann/json.hpp>

namespace fathom {
namespace {

// Ordered: the tag comes first, as readers of tagged unions expect it.
using Json = nlohmann::ordered_json;

// The events of one step are one logical group: a block stands for its tokens in all layers, and
// only resumable ones are announced, so a router may treat it as a block of full attention.
constexpr int kGroup = 0;
constexpr char kGroupKind[] = "full_attention";

bool ContinuesRun(const CacheEvent& last, const CacheEvent& next) {
  if (next.kind != last.kind || next.tier != last.tier) return false;
  if (next.kind == CacheEvent::Kind::kRemoved) return true;
  return next.kind == CacheEvent::Kind::kStored && !next.first && next.parent == last.hash;
}

// An event's fields in vLLM's order. Arrays hold the values alone.
class FieldList {
 public:
  FieldList(KvEventEncoding encoding, const char* tag)
      : array_(encoding == KvEventEncoding::kArray) {
    value_ = array_ ? Json::array() : Json::object();
    Add("type", tag);
  }
  void Add(const char* name, Json value) {
    if (array_) value_.push_back(std::move(value));
    else value_[name] = std::move(value);
  }
  Json Take() { return std::move(value_); }

 private:
  const bool array_;
  Json value_;
};

Json Stored(const CacheEvent* run, size_t count, const KvEventFormat& format) {
  Json hashes = Json::array(), tokens = Json::array(), extra_keys = Json::array();
  for (size_t i = 0; i < count; ++i) {
    hashes.push_back(run[i].hash.word());
    for (const TokenId token : run[i].tokens) tokens.push_back(token);
    const bool salted = run[i].first && run[i].parent != format.common_root;
    extra_keys.push_back(salted ? Json::array({run[i].parent.Hex()}) : Json());
  }
  FieldList fields(format.encoding, "BlockStored");
  fields.Add("block_hashes", std::move(hashes));
  fields.Add("parent_block_hash", run[0].first ? Json() : Json(run[0].parent.word()));
  fields.Add("token_ids", std::move(tokens));
  fields.Add("block_size", format.block_tokens);
  fields.Add("lora_id", Json());
  fields.Add("medium", MediumName(run[0].tier));
  fields.Add("lora_name", Json());
  fields.Add("extra_keys", std::move(extra_keys));
  fields.Add("group_idx", kGroup);
  fields.Add("kv_cache_spec_kind", kGroupKind);
  return fields.Take();
}

Json Removed(const CacheEvent* run, size_t count, const KvEventFormat& format) {
  Json hashes = Json::array();
  for (size_t i = 0; i < count; ++i) hashes.push_back(run[i].hash.word());
  FieldList fields(format.encoding, "BlockRemoved");
  fields.Add("block_hashes", std::move(hashes));
  fields.Add("medium", MediumName(run[0].tier));
  fields.Add("group_idx", kGroup);
  return fields.Take();
}

}  // namespace

const char* MediumName(CacheTier tier) {
  switch (tier) {
    case CacheTier::kDevice: return "GPU";
    case CacheTier::kHost: return "CPU";
    case CacheTier::kDisk: return "STORAGE";
  }
  return "GPU";
}

std::string EncodeKvEvents(const std::vector<CacheEvent>& events, double timestamp,
                           const KvEventFormat& format) {
  Json list = Json::array();
  for (size_t begin = 0, end = 0; begin < events.size(); begin = end) {
    end = begin + 1;
    while (end < events.size() && ContinuesRun(events[end - 1], events[end])) ++end;
    const CacheEvent* run = &events[begin];
    switch (run->kind) {
      case CacheEvent::Kind::kStored: list.push_back(Stored(run, end - begin, format)); break;
      case CacheEvent::Kind::kRemoved: list.push_back(Removed(run, end - begin, format)); break;
      case CacheEvent::Kind::kCleared:
        list.push_back(FieldList(format.encoding, "AllBlocksCleared").Take());
        break;
    }
  }
  const Json batch = Json::array({timestamp, std::move(list), format.data_parallel_rank});
  std::string bytes;
  Json::to_msgpack(batch, bytes);
  return bytes;
}

}  // namespace fathom
