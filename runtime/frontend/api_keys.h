// The keys that clients may use, from the command line and a file.
#ifndef BLINK_FRONTEND_API_KEYS_H
#define BLINK_FRONTEND_API_KEYS_H

#include <string>
#include <string_view>
#include <vector>

namespace blink {

// Immutable once loaded. A key itself appears in no message and no log, only its name does.
class ApiKeys {
 public:
  // No key is asked for.
  ApiKeys() = default;

  // `keys` get the names key-1, key-2, ... `path` (empty: none) has a key or "NAME KEY" in each
  // line; empty lines and those that begin with # do not count. Throws std::runtime_error naming
  // file and line, also when the file holds no key: with it nobody could come in, and one that is
  // just being written looks so.
  static ApiKeys load(const std::vector<std::string>& keys, const std::string& path);

  bool asks_for_key() const { return asks_for_key_; }

  // The name of the key that `authorization` ("Bearer KEY") holds; null: none of them. Its time
  // depends on lengths only, not on where two keys differ. The name lives as long as this object.
  const std::string* name_of(std::string_view authorization) const;

 private:
  struct Key {
    std::string name;
    std::string secret;
  };

  void add(std::string name, std::string secret, const std::string& where);

  std::vector<Key> keys_;
  bool asks_for_key_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_API_KEYS_H
