// Reads the YAML file of --config into flat (name, value) pairs.
//
//   port: 9000
//   attention-config: {indexer_kv_dtype: fp8}     # the flag --attention-config.indexer_kv_dtype
//   compilation-config: {cudagraph_mode: NONE}    # a flag that takes JSON gets JSON
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/status.h"

namespace fathom {

struct ConfigEntry {
  std::string key;    // as the flag without dashes; '_' before the first '.' is '-'
  std::string value;  // scalars as written, sequences comma-separated, maps as JSON
  int line = 0;       // from 1
};

// A nested map becomes one JSON value when `is_setting` knows its key, else dotted keys. Errors
// name the file and line; a key given twice is one.
Expected<std::vector<ConfigEntry>> ReadConfigFile(
    const std::string& path, const std::function<bool(const std::string&)>& is_setting);

}  // namespace fathom
