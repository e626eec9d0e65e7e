// Numbers as people read them, whatever the locale: 5120 is 5,120; bytes come with GiB beside them.
#pragma once

#include <cstdint>
#include <string>

namespace fathom {

std::string Grouped(int64_t value);  // "1,048,576"

// GiB (2^30), three decimals: "9.617". Small amounts in MiB or KiB by Amount.
std::string Gib(int64_t bytes);

// The largest of GiB, MiB and KiB that leaves at least 1, three decimals: "9.617 GiB", "4.935 MiB".
std::string Amount(int64_t bytes);

// Both: "5,174,272 B (4.935 MiB)".
std::string BytesAndAmount(int64_t bytes);

}  // namespace fathom
