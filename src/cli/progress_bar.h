// A progress bar on standard error while a prompt is prefilled. Silent when standard error is no
// terminal.
//
//   ProgressBar bar("reading");
//   bar.Update(4096, 24012);   // redrawn in place, at most ten times a second
//   bar.Clear();               // leaves no trace
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fathom {

class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  void Update(int64_t done, int64_t total);
  void Clear();

 private:
  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_, last_;
};

}  // namespace fathom
