//! A chart: curves of several runs over one axis, as a group of SVG elements.

use std::fmt::Write as _;

use crate::picture::escaped;

/// The rectangle of the curves, in pixels; labels stand to its left and below.
pub(super) const LEFT: f64 = 80.0;
pub(super) const WIDTH: f64 = 800.0;
pub(super) const HEIGHT: f64 = 200.0;
/// Ticks that an axis has at most.
const MAX_TICKS: f64 = 8.0;

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stroke {
    /// Values as they are, behind smoothed ones.
    Pale,
    Solid,
    Dashed,
    Dotted,
}

/// The values of one run.
#[derive(Debug)]
pub(super) struct Curve {
    pub(super) name: String,
    /// Number of the run, which has a colour of its own.
    pub(super) run: usize,
    pub(super) stroke: Stroke,
    /// By ascending x.
    pub(super) points: Vec<(f64, f64)>,
}

/// Curves of one quantity.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    /// A logarithmic axis, for values above 0.
    pub(super) is_log: bool,
    pub(super) curves: Vec<Curve>,
}

/// From values to pixels.
#[derive(Debug, Clone, PartialEq)]
struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// An axis that holds these values and ends at ticks.
    fn of(low: f64, high: f64, is_log: bool) -> Self {
        if is_log { Self::logarithmic(low, high) } else { Self::linear(low, high) }
    }

    fn linear(low: f64, high: f64) -> Self {
        // One value is in the middle.
        let half = if high > low { 0.0 } else { Some(low.abs()).filter(|low| *low > 0.0).unwrap_or(1.0) };
        let (low, high) = (low - half, high + half);
        let rough = (high - low) / (MAX_TICKS - 2.0);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough).unwrap_or(rough);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let ticks: Vec<f64> = (0..=(last - first) as u32).map(|i| (first + f64::from(i)) * step).collect();
        Self { low: first * step, high: last * step, is_log: false, ticks }
    }

    /// Ticks at 1, 2 and 5 times powers of ten, or at powers only when there are many.
    fn logarithmic(low: f64, high: f64) -> Self {
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let all: Vec<f64> = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(power))).collect();
        let first = all.iter().rposition(|tick| *tick <= low).unwrap_or(0);
        let last = all.iter().position(|tick| *tick >= high).unwrap_or(all.len() - 1).max(first + 1).min(all.len() - 1);
        let mut ticks = all[first..=last].to_vec();
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        if ticks.len() as f64 > MAX_TICKS {
            ticks.retain(|tick| (tick.log10() - tick.log10().round()).abs() < 1e-6);
        }
        Self { low, high, is_log: true, ticks }
    }

    /// Where a value is, 0 at the low end and 1 at the high one.
    fn place(&self, value: f64) -> f64 {
        match self.is_log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

/// A number at a tick, with thousands separated.
fn label(tick: f64) -> String {
    if tick.abs() >= 1000.0 {
        return format!("{}{}", if tick < 0.0 { "-" } else { "" }, crate::report::count(tick.abs().round() as u64));
    }
    // Seven digits leave out what is only rounding.
    let text = format!("{:.7}", tick + 0.0);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.trim_start_matches('-') == "0" && tick.abs() > 1e-12 { format!("{tick:.0e}") } else { text.to_owned() }
}

/// The colour of a run, readable on light and on dark paper.
pub(super) fn colour(run: usize) -> String {
    // The golden angle keeps neighbours apart. From HSL to RGB as in CSS Color 4, section 7.
    let (hue, saturation, lightness) = ((215.0 + 137.5 * run as f64) % 360.0, 0.65, 0.48);
    let channel = |n: f64| {
        let k = (n + hue / 30.0) % 12.0;
        let light = lightness - saturation * lightness * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (255.0 * light).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(0.0), channel(8.0), channel(4.0))
}

impl Chart {
    /// Draws the curves at a height of the picture, over an x axis from 0 to `end`.
    pub(super) fn draw(&self, svg: &mut String, top: f64, end: f64) {
        let values = || self.curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.1));
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let (x, y) = (Axis { high: end, ..Axis::linear(0.0, end) }, Axis::of(low, high, self.is_log));
        let bottom = top + HEIGHT;
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{}</text>",
            top - 10.0,
            escaped(&self.title)
        );
        for tick in &y.ticks {
            let at = bottom - HEIGHT * y.place(*tick);
            let (right, text) = (LEFT + WIDTH, label(*tick));
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 8.0,
                at + 4.0
            );
        }
        for tick in x.ticks.iter().filter(|tick| **tick <= end) {
            let (at, text) = (LEFT + WIDTH * x.place(*tick), label(*tick));
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{at:.1} {top}V{bottom}\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                bottom + 18.0
            );
        }
        for curve in &self.curves {
            let pixel = |&(a, b): &(f64, f64)| (LEFT + WIDTH * x.place(a), bottom - HEIGHT * y.place(b));
            let pixels = thinned(curve.points.iter().map(pixel));
            let mut path = String::new();
            for (number, (a, b)) in pixels.iter().enumerate() {
                let _ = write!(path, "{}{a:.1} {b:.1}", if number == 0 { "M" } else { "L" });
            }
            // A line without length is a dot.
            path += "h0";
            let style = match curve.stroke {
                Stroke::Pale => " opacity=\"0.35\" stroke-width=\"1\"",
                Stroke::Solid => "",
                Stroke::Dashed => " stroke-dasharray=\"7 5\"",
                Stroke::Dotted => " stroke-dasharray=\"1 5\"",
            };
            let (colour, name) = (colour(curve.run), escaped(&curve.name));
            let _ = writeln!(
                svg,
                "<path class=\"curve\" stroke=\"{colour}\"{style} d=\"{path}\"><title>{name}</title></path>"
            );
        }
    }
}

/// At most two points for each column of pixels, the lowest and the highest, in their order.
fn thinned(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    // Where the points of the last column begin.
    let mut begin = 0;
    for point in points {
        if kept.get(begin).is_some_and(|first| first.0.floor() != point.0.floor()) {
            begin = kept.len();
        }
        kept.push(point);
        if let [a, b, c] = kept[begin..] {
            // The one between the two others goes.
            let is_between = |y: f64, p: f64, q: f64| p.min(q) <= y && y <= p.max(q);
            let gone = if is_between(b.1, a.1, c.1) {
                1
            } else if is_between(a.1, b.1, c.1) {
                0
            } else {
                2
            };
            kept.remove(begin + gone);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        let linear = |low, high| Axis::linear(low, high).ticks;
        assert_eq!(linear(1.0, 9.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(linear(-3.0, 47.0), [-10.0, 0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(Axis::logarithmic(30.0, 700.0).ticks, [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(Axis::logarithmic(1.5, 1e6).ticks.len(), 7, "powers of ten");
        // One value has an axis, too.
        for axis in [Axis::linear(0.2, 0.2), Axis::linear(0.0, 0.0), Axis::logarithmic(10.0, 10.0)] {
            assert!(axis.high > axis.low && axis.place(axis.low) == 0.0, "{axis:?}");
        }
    }

    /// By hand: a hue of 215 degrees is between cyan and blue, 0.48 (1 - 0.65) to 0.48 (1 + 0.65), and 25 of 60 degrees of green.
    #[test]
    fn colours_differ() {
        assert_eq!(colour(0), "#2b6dca");
        let mut all: Vec<String> = (0..100).map(colour).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 100);
    }

    #[test]
    fn labels_read_well() {
        let ticks = [0.0, -0.0, 0.05, 0.1 + 0.2, 250.0, 1500.0, -1500.0, 3e-9];
        assert_eq!(ticks.map(label), ["0", "0", "0.05", "0.3", "250", "1,500", "-1,500", "3e-9"]);
    }

    /// By hand: in the first column 5 and 1 are the extremes, and 5 comes first.
    #[test]
    fn a_column_of_pixels_keeps_its_extremes() {
        let column = [(0.0, 3.0), (0.2, 5.0), (0.4, 2.0), (0.6, 1.0), (0.8, 4.0), (1.5, 7.0)];
        assert_eq!(thinned(column.into_iter()), [(0.2, 5.0), (0.6, 1.0), (1.5, 7.0)]);
        let dense = thinned((0..100_000).map(|i| (f64::from(i) / 1000.0, f64::from(i % 977))));
        assert_eq!(dense.len(), 200);
        assert!(dense.chunks(2).all(|pair| pair[0].1.max(pair[1].1) == 976.0 && pair[0].1.min(pair[1].1) == 0.0));
    }

    /// By hand: values from 1 to 9 have an axis from 0 to 10; 9 at step 50 of 100 is at the middle, a tenth below the top.
    #[test]
    fn a_value_is_at_its_pixel() {
        let points = vec![(0.0, 1.0), (50.0, 9.0), (100.0, 1.0)];
        let curve = Curve { name: "a<b".to_owned(), run: 0, stroke: Stroke::Solid, points };
        let mut svg = String::new();
        Chart { title: "t&u".to_owned(), is_log: false, curves: vec![curve] }.draw(&mut svg, 100.0, 100.0);
        assert!(svg.contains("d=\"M80.0 280.0L480.0 120.0L880.0 280.0h0\"><title>a&lt;b</title>"), "{svg}");
        assert!(svg.contains(">t&amp;u</text>"), "{svg}");
    }
}
