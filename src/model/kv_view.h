// KvView: where the forward pass reads and writes the cache, per layer. Built by cache/ from its
// pools and Geometry; the forward pass knows neither.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/paged_rows.h"

namespace fathom {

struct LayerKv {
  ops::PagedRows ring;           // window_kv; block = slot
  ops::PagedRows compressed;     // csa_kv or hca_kv; base == null for SWA layers
  ops::PagedRows index_keys;     // index_k; CSA only
  float* state = nullptr;        // csa_state or hca_state in slot 0
  int64_t state_stride = 0;      // floats from slot to slot
  float* index_state = nullptr;  // index_state in slot 0; CSA only
  int64_t index_state_stride = 0;
};

struct KvView {
  std::vector<LayerKv> layers;
};

}  // namespace fathom
