#pragma once

namespace fathom {

inline constexpr char kVersion[] = "0.1.0";
inline constexpr char kFingerprint[] = "fathom-0.1.0";

}  // namespace fathom
