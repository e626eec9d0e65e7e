#include "cli/progress_bar.h"

#include <unistd.h>

#include "core/stderr_print.h"

namespace fathom {

using std::chrono::steady_clock;

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(steady_clock::now()) {}

void ProgressBar::Update(int64_t done, int64_t total) {
  const auto now = steady_clock::now();
  if (!terminal_ || total <= 0 || now - last_ < std::chrono::milliseconds(100)) return;
  if (now - start_ < std::chrono::milliseconds(300)) return;  // over before it could be read
  last_ = now;
  drawn_ = true;
  constexpr int kWidth = 30;
  const int filled = static_cast<int>(kWidth * done / total);
  std::string bar;
  for (int i = 0; i < kWidth; ++i) bar += i < filled ? "█" : "░";
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  PrintStderr("\r\x1b[K{} {} {:3} %  {} of {} tokens, {:.0f} tok/s", label_, bar,
              100 * done / total, done, total, rate);
}

void ProgressBar::Clear() {
  if (!drawn_) return;
  PrintStderr("\r\x1b[K");
  drawn_ = false;
}

}  // namespace fathom
