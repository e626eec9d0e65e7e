// RetainedSessions: the named sessions whose time has not run out. What they left in the prefix
// cache carries its time itself (PrefixCache::Keep); this table only knows how many there are, so
// it may forget those that expire first when clients name more than it holds.
//
//   RetainedSessions sessions(65'536);
//   sessions.Retain("agent-7", now + 3600);
//   sessions.Expire(now);
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <unordered_map>

namespace fathom {

class RetainedSessions {
 public:
  explicit RetainedSessions(size_t capacity) : capacity_(capacity) {}
  RetainedSessions(const RetainedSessions&) = delete;  // order_ points into places_
  RetainedSessions& operator=(const RetainedSessions&) = delete;

  // A session that is there already is retained until then and no longer. Beyond the capacity the
  // one that expires first is let go.
  void Retain(const std::string& session, double until);
  void Expire(double now);
  void Clear();

  size_t size() const { return places_.size(); }

 private:
  using Order = std::multimap<double, const std::string*>;  // keys of places_, which do not move
  void DropFirst();

  size_t capacity_;
  Order order_;  // by when they expire
  std::unordered_map<std::string, Order::iterator> places_;
};

}  // namespace fathom
