// The timeline as one SVG picture: no scripts, no external fonts, readable at 1200 px on a white or
// dark page. Events narrower than a pixel are summed into half-pixel columns that take the colour
// of the kind that filled them, so that a pass with a million tiles still gives a picture of some
// hundred kilobytes that tells the truth.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <vector>

#include "moxie/trace/writers.h"

namespace moxie::trace {
namespace {

constexpr double kMargin = 24, kLeft = 164, kRight = 84;  // label column, busy column
constexpr double kTitleHeight = 62, kPanelHeight = 30, kLegendHeight = 24, kAxisHeight = 42;
constexpr double kGroupGap = 10, kLaneGap = 2, kColumn = 0.5;
constexpr std::int32_t kMaxLanes = 48;  // of a rank
constexpr double kExactWidth = 1.2;     // narrower events go into columns
constexpr double kTooltipWidth = 3.0;   // wider events say what they are when pointed at
constexpr double kCharWidth =
    7.7;  // generous for 13 px text, so that nothing overlaps with any font

struct Style {
  const char* fill;
  const char* label;
};
Style style(Kind kind) {
  switch (kind) {
    case Kind::stage: return {"#8d99a8", "stage + sort"};
    case Kind::schedule: return {"#4b5563", "schedule"};
    case Kind::dispatch: return {"#2c7be0", "dispatch (pull)"};
    case Kind::fc1: return {"#f28e2b", "FC1 + activation"};
    case Kind::fc2: return {"#d9455f", "FC2"};
    case Kind::dgrad: return {"#e8b820", "dgrad"};
    case Kind::dx: return {"#b5479b", "dX"};
    case Kind::wgrad: return {"#5aa03c", "wgrad"};
    case Kind::combine: return {"#12a5a0", "combine (push)"};
    case Kind::merge: return {"#7452b8", "merge"};
    case Kind::wait: return {"url(#wait)", "wait"};
  }
  return {"#000000", "?"};
}

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.2f", value);
  std::string text = buffer;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

struct TimeUnit {
  double ns;
  const char* name;
};
TimeUnit time_unit(double span) {
  return span < 1e6 ? TimeUnit{1e3, "µs"} : span < 1e10 ? TimeUnit{1e6, "ms"} : TimeUnit{1e9, "s"};
}

std::string time_text(double ns) {
  const TimeUnit unit = time_unit(ns);
  const double value = ns / unit.ns;
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, value < 10 ? "%.2f" : value < 100 ? "%.1f" : "%.0f", value);
  return std::string(buffer) + " " + unit.name;
}

std::string percent(double share) {
  if (share > 0 && share < 0.01) return "<1 %";
  return std::to_string(std::lround(100 * share)) + " %";
}

void text(std::string& out, double x, double y, const char* css_class, std::string_view content) {
  out += "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" class=\"" + css_class + "\">" +
         escape(content) + "</text>\n";
}

void rect(std::string& out, double x, double y, double width, double height,
          std::string_view attributes) {
  out += "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) +
         "\" height=\"" + number(height) + "\" " + std::string(attributes) + "/>\n";
}

std::string kind_class(Kind kind) { return "k" + std::to_string(static_cast<int>(kind)); }

// Draws one panel after another downwards; `y` is where the next thing goes.
class Picture {
 public:
  explicit Picture(const SvgOptions& options)
      : width_(options.width_px), plot_width_(options.width_px - kLeft - kRight) {
    text(body_, kMargin, 34, "title", options.title);
    text(body_, kMargin, 56, "sub", options.subtitle);
  }

  void add_panel(const Trace& trace) {
    const double span = static_cast<double>(std::max<std::int64_t>(span_ns(trace), 1));
    scale_ = plot_width_ / span;
    const auto sums = time_by_kind_ns(trace);
    const double all = span * static_cast<double>(std::max<std::int64_t>(num_workers(trace), 1));
    double busy = 0;
    for (const Kind kind : kDataFlowOrder) {
      if (kind != Kind::wait) busy += static_cast<double>(sums[static_cast<std::size_t>(kind)]);
    }
    y_ += kPanelHeight;
    text(body_, kMargin, y_ - 8, "panel",
         trace.title + " · " + time_text(span) + " · workers " + percent(busy / all) + " busy");
    add_legend(trace, sums, all);
    const double top = y_;
    const std::size_t grid_at = body_.size();
    text(body_, width_ - kMargin, y_ - 4, "right", "busy");
    pieces_ = without_nesting(trace);
    for (std::int32_t rank = 0; rank < trace.num_ranks; ++rank) add_rank(trace, rank, span);
    std::string grid;
    add_axis(grid, top, span);
    body_.insert(grid_at, grid);  // the grid lies under the lanes
  }

  std::string finish() const {
    std::string out =
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + number(width_) + "\" height=\"" +
        number(y_) + "\" viewBox=\"0 0 " + number(width_) + " " + number(y_) + "\">\n<style>\n" +
        "text{font-family:'Helvetica Neue',Arial,'DejaVu "
        "Sans',sans-serif;fill:#1f2937;font-size:13px}\n"
        ".title{font-size:21px;font-weight:bold}.sub{fill:#4b5563}.panel{font-size:16px;font-"
        "weight:bold}\n"
        ".rank{font-size:14px;font-weight:bold}.lane{font-size:12px;fill:#4b5563;text-anchor:end}\n"
        ".tick{font-size:12px;fill:#4b5563;text-anchor:middle}.right{font-size:12px;text-anchor:"
        "end}\n";
    for (const Kind kind : kDataFlowOrder) {
      out += "." + kind_class(kind) + "{fill:" + style(kind).fill + "}";
    }
    out +=
        "\n</style>\n<defs>\n"
        "<pattern id=\"wait\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
        "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#f3f4f6\"/>"
        "<rect width=\"1.6\" height=\"6\" fill=\"#d7dbe1\"/></pattern>\n"
        "<pattern id=\"shared\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
        "patternTransform=\"rotate(-45)\"><rect width=\"2\" height=\"5\" fill=\"#ffffff\" "
        "fill-opacity=\"0.5\"/></pattern>\n</defs>\n";
    rect(out, 0, 0, width_, y_, "fill=\"#ffffff\" rx=\"10\"");
    return out + body_ + "</svg>\n";
  }

 private:
  void add_legend(const Trace& trace, const std::array<std::int64_t, kNumKinds>& sums, double all) {
    const bool any_shared = std::any_of(trace.events.begin(), trace.events.end(),
                                        [](const Event& event) { return event.shared; });
    double x = kMargin, traced = 0;
    y_ += 4;
    for (const Kind kind : kDataFlowOrder) {
      const double share = static_cast<double>(sums[static_cast<std::size_t>(kind)]) / all;
      traced += share;
      if (share > 0)
        add_legend_item(x, "class=\"" + kind_class(kind) + "\"", style(kind).label, share);
    }
    if (traced < 0.995)
      add_legend_item(x, "fill=\"#fafafa\" stroke=\"#d1d5db\"", "idle or preempted", 1 - traced);
    if (any_shared) {
      add_legend_item(x, "class=\"" + kind_class(Kind::fc1) + "\"", "striped: shared expert", -1);
      rect(body_, last_swatch_x_, y_, 14, 14, "fill=\"url(#shared)\"");
    }
    y_ += kLegendHeight + 12;
  }

  void add_legend_item(double& x, const std::string& fill, const char* label, double share) {
    const std::string words = share < 0 ? label : std::string(label) + " " + percent(share);
    const double item_width = 14 + 6 + kCharWidth * static_cast<double>(words.size()) + 14;
    if (x + item_width > width_ - kMargin && x > kMargin) {
      x = kMargin;
      y_ += kLegendHeight;
    }
    rect(body_, x, y_, 14, 14, "rx=\"2\" " + fill);
    text(body_, x + 20, y_ + 12, "key", words);
    last_swatch_x_ = x;
    x += item_width;
  }

  void add_rank(const Trace& trace, std::int32_t rank, double span) {
    const std::int32_t lanes = trace.comm_workers + trace.compute_workers;
    const std::int32_t step = (lanes + kMaxLanes - 1) / kMaxLanes;  // a GPU has hundreds
    const std::int32_t drawn = (lanes + step - 1) / step;
    const double lane_height = trace.num_ranks * drawn > 32 ? 15 : 22;
    const double group_height = drawn * (lane_height + kLaneGap);
    text(body_, kMargin, y_ + group_height / 2 + 4, "rank", "rank " + std::to_string(rank));
    if (step > 1)
      text(body_, kMargin, y_ + group_height / 2 + 20, "key", "1 of " + std::to_string(step));
    for (std::int32_t lane = 0; lane < lanes; lane += step) {
      const Role role = lane < trace.comm_workers ? Role::comm : Role::compute;
      const std::int32_t worker = lane < trace.comm_workers ? lane : lane - trace.comm_workers;
      text(body_, kLeft - 8, y_ + lane_height / 2 + 4, "lane",
           (role == Role::comm ? "comm " : "compute ") + std::to_string(worker));
      rect(body_, kLeft, y_, plot_width_, lane_height, "fill=\"#fafafa\"");
      const double busy = add_lane(rank, role, worker, lane_height);
      text(body_, width_ - kMargin, y_ + lane_height / 2 + 4, "right", percent(busy / span));
      y_ += lane_height + kLaneGap;
    }
    y_ += kGroupGap - kLaneGap;
  }

  // Returns the lane's busy time. Wide events are drawn as they are, the others through columns.
  double add_lane(std::int32_t rank, Role role, std::int32_t worker, double height) {
    std::vector<std::array<float, kNumKinds>> columns(
        static_cast<std::size_t>(plot_width_ / kColumn) + 1);
    std::string wide;
    double busy = 0;
    for (const Event& event : pieces_) {
      if (event.rank != rank || event.role != role || event.worker != worker) continue;
      const double begin = static_cast<double>(event.begin_ns),
                   end = static_cast<double>(event.end_ns);
      if (event.kind != Kind::wait) busy += end - begin;
      if ((end - begin) * scale_ >= kExactWidth) {
        add_wide(wide, event, height);
      } else {
        add_narrow(columns, event);
      }
    }
    add_columns(columns, height);
    body_ += wide;
    return busy;
  }

  void add_wide(std::string& out, const Event& event, double height) const {
    const double x = kLeft + static_cast<double>(event.begin_ns) * scale_;
    const double full = static_cast<double>(event.end_ns - event.begin_ns) * scale_;
    const double width =
        full > 4 && event.kind != Kind::wait ? full - 0.6 : full;  // a seam between tiles
    const std::string fill = "class=\"" + kind_class(event.kind) + "\"";
    if (full < kTooltipWidth) {
      rect(out, x, y_, width, height, fill);
    } else {
      std::string words = name(event.kind);
      if (event.kind == Kind::wait) words += std::string(" for ") + name(event.what);
      if (event.shared) words = "shared expert " + words;
      if (event.block >= 0) words += ", block " + std::to_string(event.block);
      if (event.tile >= 0) words += ", tile " + std::to_string(event.tile);
      words += ", " + time_text(static_cast<double>(event.end_ns - event.begin_ns));
      out += "<g><title>" + escape(words) + "</title>";
      rect(out, x, y_, width, height, fill);
      out += "</g>";
    }
    if (event.shared)
      rect(out, x, y_, width, height, "fill=\"url(#shared)\" pointer-events=\"none\"");
  }

  void add_narrow(std::vector<std::array<float, kNumKinds>>& columns, const Event& event) const {
    double begin = static_cast<double>(event.begin_ns) * scale_ / kColumn;
    const double end = static_cast<double>(event.end_ns) * scale_ / kColumn;
    while (begin < end) {
      const auto column = std::min(static_cast<std::size_t>(begin), columns.size() - 1);
      const double stop = std::min(end, std::floor(begin) + 1);
      columns[column][static_cast<std::size_t>(event.kind)] += static_cast<float>(stop - begin);
      begin = stop;
    }
  }

  // Neighbouring columns of one kind become one rectangle. A column shows something when at least a
  // third is filled.
  void add_columns(const std::vector<std::array<float, kNumKinds>>& columns, double height) {
    constexpr int kNone = -1;
    int run_kind = kNone;
    std::size_t run_begin = 0;
    for (std::size_t i = 0; i <= columns.size(); ++i) {
      int kind = kNone;
      if (i < columns.size()) {
        float filled = 0;
        for (const float part : columns[i]) filled += part;
        const auto largest = std::max_element(columns[i].begin(), columns[i].end());
        if (filled > 0.33f) kind = static_cast<int>(largest - columns[i].begin());
      }
      if (kind == run_kind) continue;
      if (run_kind != kNone) {
        rect(body_, kLeft + static_cast<double>(run_begin) * kColumn, y_,
             static_cast<double>(i - run_begin) * kColumn, height,
             "class=\"" + kind_class(static_cast<Kind>(run_kind)) + "\"");
      }
      run_kind = kind;
      run_begin = i;
    }
  }

  void add_axis(std::string& grid, double top, double span) {
    const TimeUnit unit = time_unit(span);
    const double total = span / unit.ns;
    double step = std::pow(10.0, std::floor(std::log10(total / 8)));
    for (const double factor : {2.0, 2.5, 2.0}) {
      if (total / step > 10) step *= factor;
    }
    const double bottom = y_ - kGroupGap + 6;
    for (double tick = 0; tick <= total * (1 + 1e-9); tick += step) {
      const double x = kLeft + tick * unit.ns * scale_;
      grid += "<path d=\"M" + number(x) + " " + number(top - 2) + "V" + number(bottom) +
              "\" stroke=\"#d1d5db\" fill=\"none\"/>\n";
      text(body_, x, bottom + 14, "tick", number(tick) + " " + unit.name);
    }
    y_ += kAxisHeight;
  }

  double width_, plot_width_;
  double y_ = kTitleHeight;
  double scale_ = 1;  // pixels per nanosecond
  double last_swatch_x_ = 0;
  std::vector<Event> pieces_;  // of the panel's trace
  std::string body_;
};

}  // namespace

std::string to_svg(std::span<const Trace> passes, const SvgOptions& options) {
  Picture picture(options);
  for (const Trace& pass : passes) picture.add_panel(pass);
  return picture.finish();
}

}  // namespace moxie::trace
