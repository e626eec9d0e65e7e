#include "model/shards.h"

#include <fcntl.h>
#include <unistd.h>

#include <map>

#include "core/log.h"
#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

bool Exists(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

bool IsWoAScale(std::string_view name) {
  return name.ends_with("attn.wo_a.scale") || name.ends_with("o_a_proj.weight_scale_inv");
}

struct Index {
  std::map<std::string, std::string> shard_of;  // tensor -> shard file name
  int64_t total_size = -1;                      // -1: not stated
};

Expected<Index> ReadIndex(const std::string& path) {
  FATHOM_ASSIGN(const std::string text, ReadTextFile(path, 256 << 20));
  auto document = ParseStrictJson(text, path);
  if (!document) return Fail(Code::kDataLoss, "{}", document.error().message);
  const auto map = document->is_object() ? document->find("weight_map") : document->end();
  if (map == document->end() || !map->is_object() || map->empty()) {
    return Fail(Code::kDataLoss, "{}: weight_map is missing or not an object", path);
  }
  Index index;
  for (const auto& item : map->items()) {
    // A shard is a file of this directory, never a path out of it.
    if (!item.value().is_string() || item.value().get_ref<const std::string&>().empty() ||
        item.value().get_ref<const std::string&>().find('/') != std::string::npos) {
      return Fail(Code::kDataLoss, "{}: weight_map.{}: {} is not a file name", path, item.key(),
                  ShortJson(item.value()));
    }
    index.shard_of.emplace(item.key(), item.value().get<std::string>());
  }
  if (const auto metadata = document->find("metadata");
      metadata != document->end() && metadata->is_object()) {
    const auto size = metadata->find("total_size");
    if (size != metadata->end() && size->is_number_unsigned()) {
      index.total_size = size->get<int64_t>();
    }
  }
  return index;
}

Status AddFile(ShardSet& set, const std::string& path) {
  FATHOM_ASSIGN(SafeTensorsFile file, SafeTensorsFile::Open(path));
  set.files.push_back(std::move(file));
  return {};
}

Status CheckIndex(ShardSet& set, const Index& index, const std::string& directory) {
  for (const SafeTensorsFile& file : set.files) {
    const std::string shard = file.path().substr(directory.size() + 1);
    for (const TensorInfo& tensor : file.tensors()) {
      const auto entry = index.shard_of.find(tensor.name);
      if (entry == index.shard_of.end() && !IsWoAScale(tensor.name)) {
        return Fail(Code::kDataLoss, "{}: tensor {} is not in {}", file.path(), tensor.name,
                    set.origin);
      }
      if (entry != index.shard_of.end() && entry->second != shard) {
        return Fail(Code::kDataLoss, "{}: tensor {} belongs in {} by the index", file.path(),
                    tensor.name, entry->second);
      }
    }
  }
  for (const auto& [name, shard] : index.shard_of) {
    if (!set.tensors.contains(name) && !IsWoAScale(name)) {
      return Fail(Code::kDataLoss, "{}/{}: tensor {} is missing; {} says it is there", directory,
                  shard, name, set.origin);
    }
  }
  if (index.total_size >= 0 && index.total_size != set.total_bytes) {
    // Every tensor is checked by itself, so a stale sum harms nothing.
    Log().warn("{}: metadata.total_size is {}, the shards hold {} bytes", set.origin,
               index.total_size, set.total_bytes);
  }
  return {};
}

}  // namespace

Expected<ShardSet> OpenShards(const std::string& directory) {
  ShardSet set;
  Index index;
  const std::string index_path = directory + "/model.safetensors.index.json";
  const std::string single_path = directory + "/model.safetensors";
  const bool sharded = Exists(index_path);
  if (sharded) {
    set.origin = index_path;
    FATHOM_ASSIGN(index, ReadIndex(index_path));
    std::map<std::string, std::string> shards;  // file name -> a tensor in it
    for (const auto& [name, shard] : index.shard_of) shards.emplace(shard, name);
    for (const auto& [shard, tensor] : shards) {
      const std::string path = directory + "/" + shard;
      if (!Exists(path)) {
        return Fail(Code::kDataLoss, "{}: shard {} (tensor {} and others) is not there", index_path,
                    shard, tensor);
      }
      FATHOM_TRY(AddFile(set, path));
    }
  } else if (Exists(single_path)) {
    set.origin = single_path;
    FATHOM_TRY(AddFile(set, single_path));
  } else {
    return Fail(Code::kNotFound, "{}: neither model.safetensors.index.json nor model.safetensors",
                directory);
  }
  for (const SafeTensorsFile& file : set.files) {
    for (const TensorInfo& tensor : file.tensors()) {
      if (!set.tensors.emplace(tensor.name, &tensor).second) {
        return Fail(Code::kDataLoss, "{}: tensor {} is in another shard too", file.path(),
                    tensor.name);
      }
      set.total_bytes += tensor.bytes;
    }
  }
  if (sharded) FATHOM_TRY(CheckIndex(set, index, directory));
  return set;
}

}  // namespace fathom
