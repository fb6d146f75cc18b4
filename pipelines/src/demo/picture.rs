//! The picture of the demo: one HTML file with two SVG drawings, without a network.

use std::fmt::Write as _;

use super::{senses::Senses, surprise::Surprise};
use crate::picture::{self, escaped};

/// Size of a cell of the matrix, and of what stands beside it, in pixels.
const CELL: usize = 34;
const LABELS: usize = 560;
/// Size of a bar chart.
const BAR: usize = 18;
const LINE: usize = 26;
const WIDEST: f64 = 240.0;

/// The page. Colours have a meaning that the numbers beside them have too.
pub(super) fn page(senses: &Senses, surprises: &[Surprise]) -> String {
    let mut page = picture::page("elmo demo", "");
    let _ = writeln!(
        page,
        "<h1>One word, two senses</h1>\n<p>The vectors of <i>{}</i> in eight sentences. Each cell",
        senses.word
    );
    page += "has the cosine of two of them: the darker, the nearer. Sentences of one sense stand together.</p>\n";
    page += &matrix(senses);
    if !surprises.is_empty() {
        page += "<h1>What the language model did not expect</h1>\n<p>Surprisal of each word in bits: after the words before it \
                 (blue), and before the words after it (orange).</p>\n";
        page += &bars(surprises);
    }
    page + "</html>\n"
}

/// The cosines of all contexts, one sense after the other.
fn matrix(senses: &Senses) -> String {
    let mut order: Vec<usize> = (0..senses.contexts.len()).collect();
    order.sort_by_key(|&at| senses.contexts[at].sense);
    let off_diagonal = || {
        senses.cosines.iter().enumerate().flat_map(|(row, all)| {
            all.iter().enumerate().filter(move |(column, _)| *column != row).map(|(_, cosine)| *cosine)
        })
    };
    let (low, high) = (off_diagonal().fold(1.0, f64::min), off_diagonal().fold(-1.0, f64::max));
    let (width, height) = (LABELS + CELL * order.len(), CELL * order.len());
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" aria-label=\"matrix of cosines\">\n"
    );
    for (row, &at) in order.iter().enumerate() {
        let context = &senses.contexts[at];
        let y = row * CELL + CELL / 2 + 5;
        let _ = writeln!(
            svg,
            "<text x=\"0\" y=\"{y}\"><tspan font-weight=\"bold\">{}</tspan> {}</text>",
            context.sense,
            escaped(context.text)
        );
        for (column, &other) in order.iter().enumerate() {
            let (x, y, cosine) = (LABELS + column * CELL, row * CELL, senses.cosines[at][other]);
            let shade = if at == other { 1.0 } else { (cosine - low) / (high - low).max(1e-9) };
            let ink = if shade > 0.55 { "#fff" } else { "#000" };
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>{cosine:.3}</title></rect>\
                 <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" font-size=\"11\" style=\"fill: {ink}\">{}</text>",
                CELL - 1,
                CELL - 1,
                blue(shade),
                x + CELL / 2,
                y + CELL / 2 + 4,
                short(cosine)
            );
        }
    }
    svg + "</svg>\n"
}

/// From a light blue (0) to a dark one (1).
fn blue(shade: f64) -> String {
    let between = |light: f64, dark: f64| (light + (dark - light) * shade).round();
    format!("rgb({},{},{})", between(232.0, 24.0), between(239.0, 60.0), between(250.0, 124.0))
}

/// A cosine with two digits and without the leading zero.
fn short(cosine: f64) -> String {
    format!("{cosine:.2}").replacen("0.", ".", 1)
}

/// Two bars for each word.
fn bars(surprises: &[Surprise]) -> String {
    let most = surprises.iter().map(|word| word.forward.max(word.backward)).fold(1.0, f64::max);
    let (left, width, height) = (90, 640, LINE * surprises.len());
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" aria-label=\"surprisal of each word\">\n"
    );
    for (row, word) in surprises.iter().enumerate() {
        let top = row * LINE;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            left - 10,
            top + 17,
            escaped(&word.word)
        );
        for (side, bits, colour) in [(0, word.forward, "#2f6fd0"), (1, word.backward, "#e07b1a")] {
            let (y, wide) = (top + 3 + side * (BAR / 2 + 1), WIDEST * bits.max(0.0) / most);
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{y}\" width=\"{wide:.1}\" height=\"{}\" fill=\"{colour}\"><title>{bits:.1} bits</title></rect>",
                BAR / 2
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{}\">{:.1} | {:.1}</text>",
            left as f64 + WIDEST + 12.0,
            top + 17,
            word.forward,
            word.backward
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::senses::Context;

    #[test]
    fn the_page_has_every_number_and_no_markup_of_a_text() {
        let context = |text, sense, nearest| Context { text, sense, nearest, cosine: 0.5 };
        let senses = Senses {
            word: "bank",
            contexts: vec![context("a <b> bank", "river", 1), context("two & bank", "money", 0)],
            cosines: vec![vec![1.0, 0.25], vec![0.25, 1.0]],
        };
        let word = Surprise { word: "<bank>".to_owned(), forward: 12.34, backward: 5.0 };
        let page = page(&senses, &[word]);
        for part in ["a &lt;b&gt; bank", "two &amp; bank", ">.25<", "12.3 | 5.0", "&lt;bank&gt;", "river</tspan>"] {
            assert!(page.contains(part), "no {part} in {page}");
        }
        assert!(!page.contains("http") && !page.contains("<b>"), "{page}");
        assert!(!super::page(&senses, &[]).contains("bits"));
    }
}
