#include "record.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lines.h"

namespace moe_a2a {
namespace {

const int32_t* words_at(const char* at) { return reinterpret_cast<const int32_t*>(at); }

// Bytes of the UTF-8 character at `at`, of which `bytes` are there; 0 when there is no whole one.
int64_t character(const unsigned char* at, int64_t bytes) {
  const int64_t length = at[0] < 0x80 ? 1 : at[0] >= 0xf0 && at[0] < 0xf5 ? 4 : at[0] >= 0xe0 && at[0] < 0xf0 ? 3
                         : at[0] >= 0xc2 && at[0] < 0xe0 ? 2 : 0;
  if (length == 0 || length > bytes) return 0;
  for (int64_t i = 1; i < length; ++i)
    if ((at[i] & 0xc0) != 0x80) return 0;
  // Overlong forms, surrogates and what lies beyond U+10FFFF.
  if ((at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f) || (at[0] == 0xf0 && at[1] < 0x90) ||
      (at[0] == 0xf4 && at[1] > 0x8f))
    return 0;
  return length;
}

}  // namespace

std::string clip_text(const std::string& text, int64_t bytes) {
  const auto* data = reinterpret_cast<const unsigned char*>(text.data());
  const auto size = static_cast<int64_t>(text.size());
  int64_t end = 0;
  while (end < size) {
    const int64_t step = std::max<int64_t>(1, character(data + end, size - end));
    if (end + step > bytes) break;
    end += step;
  }
  return text.substr(0, static_cast<size_t>(end));
}

std::string readable_text(const char* text, int64_t bytes) {
  std::string result;
  const auto* data = reinterpret_cast<const unsigned char*>(text);
  for (int64_t at = 0; at < bytes;) {
    const int64_t step = character(data + at, bytes - at);
    if (step == 0 || data[at] == 0) {
      result += '?';
      ++at;
    } else {
      result.append(text + at, static_cast<size_t>(step));
      at += step;
    }
  }
  return result;
}

void write_record(const Layout& layout, char* window, int64_t source, uint64_t epoch, const CallHeader& header,
                  const void* payload, int64_t payload_bytes) {
  namespace w = record_word;
  char* record = window + layout.record_at(epoch, source);
  int32_t words[RECORD_HEADER_WORDS] = {};
  words[w::KIND] = header.kind;
  words[w::REASON] = header.reason;
  words[w::GENERATION] = header.generation;
  put64(words, w::EPOCH_LO, static_cast<int64_t>(header.epoch));
  words[w::QUANT] = header.quant;
  words[w::MODE] = header.mode;
  words[w::TOKENS] = static_cast<int32_t>(header.tokens);
  words[w::HIDDEN] = static_cast<int32_t>(header.hidden);
  words[w::DTYPE] = header.dtype;
  words[w::WEIGHT_DTYPE] = header.weight_dtype;
  words[w::TOP_K] = static_cast<int32_t>(header.top_k);
  put64(words, w::PAD_LO, header.pad_to);
  words[w::ALIGN] = header.align;
  put64(words, w::TAG_LO, header.tag);
  put64(words, w::X_LO, header.x_offset);
  words[w::FLAG_ROWS] = header.flag_rows;
  put64(words, w::ROUTING_LO, header.routing);
  put64(words, w::READ_LO, static_cast<int64_t>(header.read));
  words[w::ASYNC] = header.async;
  words[w::GRADIENTS] = header.gradients;
  put64(words, w::IDS_LO, header.ids);
  words[w::X_STRIDE] = static_cast<int32_t>(header.x_stride);
  if (header.kind == kind::ABORT) words[w::TEXT_BYTES] = static_cast<int32_t>(payload_bytes);
  if (layout.line()) {
    // All lines there can be, also where the payload is shorter: a line behind it could hold the code of a lap before, and pass
    // for one that this record, or a longer one, has yet to write.
    thread_local std::vector<char> whole;
    whole.assign(static_cast<size_t>(dropped(Rule::RECORDS_ARE_WHOLE) ? layout[RECORD_PAYLOAD] + payload_bytes
                                                                      : layout[RECORD_PAYLOAD] + layout[RECORD_PAYLOAD_BYTES]),
                 0);
    std::memcpy(whole.data(), words, sizeof words);
    if (payload_bytes > 0) std::memcpy(whole.data() + layout[RECORD_PAYLOAD], payload, static_cast<size_t>(payload_bytes));
    put_lines(record, whole.data(), static_cast<int64_t>(whole.size()), layout.code(epoch));
    return;
  }
  const Flags flags(layout.compact());
  if (dropped(Rule::PAYLOAD_BEFORE_RECORD_CODE)) {
    flags.store(record + layout[RECORD_CODE], layout.code(epoch));
    at_point("record code");
  }
  std::memcpy(record + layout[RECORD_HEADER], words, sizeof words);
  std::memcpy(record + layout[RECORD_PAYLOAD], payload, static_cast<size_t>(payload_bytes));
  at_point("record body");
  flags.store(record + layout[RECORD_CODE], layout.code(epoch));
}

bool record_here(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  const char* record = window + layout.record_at(epoch, source);
  const uint64_t code = layout.code(epoch);
  if (!layout.line()) return Flags(layout.compact()).holds(record + layout[RECORD_CODE], code);
  if (!dropped(Rule::RECORDS_ARE_WHOLE))
    return lines_hold(record, layout[RECORD_PAYLOAD] + layout[RECORD_PAYLOAD_BYTES], code);
  if (!lines_hold(record, LINE_PAYLOAD, code)) return false;
  const int32_t* words = words_at(record);
  const int64_t payload = words[record_word::KIND] == kind::ABORT ? words[record_word::TEXT_BYTES]
                          : get64(words, record_word::ROUTING_LO) != 0 ? 0
                                                                        : 4 * layout[NUM_EXPERTS];
  return lines_hold(record, layout[RECORD_PAYLOAD] + std::clamp<int64_t>(payload, 0, layout[RECORD_PAYLOAD_BYTES]), code);
}

CallHeader read_record(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  namespace w = record_word;
  const int32_t* words = words_at(window + layout.record_at(epoch, source) + layout[RECORD_HEADER]);
  CallHeader header{};
  header.kind = words[w::KIND];
  header.reason = words[w::REASON];
  header.generation = words[w::GENERATION];
  header.epoch = static_cast<uint64_t>(get64(words, w::EPOCH_LO));
  header.mode = words[w::MODE];
  header.quant = words[w::QUANT];
  header.pad_to = get64(words, w::PAD_LO);
  header.align = words[w::ALIGN];
  header.tokens = words[w::TOKENS];
  header.hidden = words[w::HIDDEN];
  header.dtype = words[w::DTYPE];
  header.weight_dtype = words[w::WEIGHT_DTYPE];
  header.top_k = words[w::TOP_K];
  header.tag = get64(words, w::TAG_LO);
  header.x_offset = get64(words, w::X_LO);
  header.x_stride = words[w::X_STRIDE];
  header.flag_rows = words[w::FLAG_ROWS];
  header.routing = get64(words, w::ROUTING_LO);
  header.read = static_cast<uint64_t>(get64(words, w::READ_LO));
  header.async = words[w::ASYNC];
  header.gradients = words[w::GRADIENTS];
  header.ids = get64(words, w::IDS_LO);
  return header;
}

namespace {
void read_payload(const Layout& layout, const char* record, char* to, int64_t bytes) {
  if (layout.line()) return get_lines(to, record, layout[RECORD_PAYLOAD], bytes);
  std::memcpy(to, record + layout[RECORD_PAYLOAD], static_cast<size_t>(bytes));
}
}  // namespace

void read_counts(const Layout& layout, const char* window, int64_t source, uint64_t epoch, int32_t* counts) {
  read_payload(layout, window + layout.record_at(epoch, source), reinterpret_cast<char*>(counts), 4 * layout[NUM_EXPERTS]);
}

std::string record_text(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  const char* record = window + layout.record_at(epoch, source);
  const int64_t bytes = words_at(record + layout[RECORD_HEADER])[record_word::TEXT_BYTES];
  std::string text(static_cast<size_t>(std::clamp<int64_t>(bytes, 0, layout[RECORD_PAYLOAD_BYTES])), '\0');
  read_payload(layout, record, text.data(), static_cast<int64_t>(text.size()));
  return readable_text(text.data(), static_cast<int64_t>(text.size()));
}

void write_status(const Layout& layout, char* window, int64_t source, status::Status state, int32_t reason, int64_t who,
                  uint64_t epoch, phase::Phase where) {
  namespace w = status_word;
  char* cell = window + layout.status_at(source);
  int32_t words[CELL_BODY_WORDS] = {};
  words[w::REASON] = reason;
  words[w::WHO] = static_cast<int32_t>(who);
  put64(words, w::EPOCH_LO, static_cast<int64_t>(epoch));
  words[w::PHASE] = where;
  words[w::GENERATION] = static_cast<int32_t>(layout[GENERATION]);
  std::memcpy(cell + layout[STATUS_BODY], words, sizeof words);
  Flags(layout.compact()).store(cell + layout[STATUS_CODE], static_cast<uint64_t>(state));
}

StatusRead read_status(const Layout& layout, const char* window, int64_t source) {
  namespace w = status_word;
  const char* cell = window + layout.status_at(source);
  const int64_t state = Flags(layout.compact()).value(cell + layout[STATUS_CODE]);
  if (state == 0) return {0, 0, -1, 0, 0};
  const int32_t* words = words_at(cell + layout[STATUS_BODY]);
  return {static_cast<int32_t>(state), words[w::REASON], words[w::WHO], static_cast<uint64_t>(get64(words, w::EPOCH_LO)),
          words[w::PHASE]};
}

uint64_t advance_counter(const Layout& layout, char* window) {
  char* counter = window + layout[PROGRESS] + 8 * progress_word::EPOCH;
  const uint64_t epoch = load_u64(counter) + 1;
  store_u64(counter, epoch);
  return epoch;
}

void write_verdict(const Layout& layout, char* window, int32_t verdict) {
  store_u64(window + layout[PROGRESS] + 8 * progress_word::VERDICT, static_cast<uint64_t>(verdict));
}

void write_progress(const Layout& layout, char* window, phase::Phase where) {
  store_u64(window + layout[PROGRESS] + 8 * progress_word::PHASE, static_cast<uint64_t>(where));
}

ProgressRead read_progress(const Layout& layout, const char* window) {
  const char* words = window + layout[PROGRESS];
  return {load_u64(words + 8 * progress_word::EPOCH), static_cast<int32_t>(load_u64(words + 8 * progress_word::PHASE)),
          static_cast<int32_t>(load_u64(words + 8 * progress_word::VERDICT))};
}

}  // namespace moe_a2a
