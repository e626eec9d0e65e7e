#include "engine/retained_sessions.h"

namespace fathom {

void RetainedSessions::Retain(const std::string& session, double until) {
  const auto [at, is_new] = places_.try_emplace(session);
  if (!is_new) order_.erase(at->second);
  at->second = order_.emplace(until, &at->first);
  if (places_.size() > capacity_) DropFirst();
}

void RetainedSessions::Expire(double now) {
  while (!order_.empty() && order_.begin()->first <= now) DropFirst();
}

void RetainedSessions::Clear() {
  order_.clear();
  places_.clear();
}

void RetainedSessions::DropFirst() {
  const auto first = order_.begin();
  places_.erase(places_.find(*first->second));
  order_.erase(first);
}

}  // namespace fathom
