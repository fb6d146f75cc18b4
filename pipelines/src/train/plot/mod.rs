//! `elmo plot`: the curves of one or several runs as one file for a browser.

mod chart;

use std::{
    fmt::{self, Write as _},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::Serialize;
use serde_json::{Map, Value};

use self::chart::{Chart, Curve, HEIGHT, LEFT, Stroke, WIDTH, colour};
use super::{
    journal::{STEPS, VALID},
    model::write_file,
};
use crate::{
    error::{Error, Result},
    picture::{self, escaped},
    report::{bytes, count, table},
};

/// By which a plot is recognised.
const MARK: &str = "<!-- made by elmo plot -->\n";
/// Heights of the picture, in pixels.
const LEGEND_LINE: f64 = 20.0;
const CHART: f64 = HEIGHT + 75.0;
/// Most characters of a name in the legend.
const NAME: usize = 100;

/// What the curves are drawn over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Steps of the run.
    Steps,
    /// Passes over its corpus.
    Epochs,
}

/// What to draw.
#[derive(Debug)]
pub struct Plot {
    /// Folders of runs.
    pub runs: Vec<PathBuf>,
    /// An .html or .svg file.
    pub output: PathBuf,
    /// The x axis.
    pub over: Over,
    /// Weight of the values before in smoothed curves, from 0 to below 1.
    pub smoothing: f64,
    /// Replace a file that is no plot.
    pub overwrite: bool,
}

/// What was drawn.
#[derive(Debug, Serialize)]
pub struct PlotReport {
    /// The file.
    pub output: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The runs.
    pub runs: Vec<PlottedRun>,
}

/// What the journals of a run have.
#[derive(Debug, Serialize)]
pub struct PlottedRun {
    /// Its folder.
    pub run: PathBuf,
    /// The last step.
    pub steps: u64,
    /// Lines of `steps.jsonl`.
    pub step_lines: usize,
    /// Lines of `valid.jsonl`.
    pub measurements: usize,
    /// The lowest held-out perplexity.
    pub perplexity: Option<f64>,
    /// Lines that could not be read, such as one that is half written.
    pub damaged_lines: usize,
}

/// A line of a journal.
struct Line {
    step: u64,
    numbers: Map<String, Value>,
}

impl Line {
    /// `None` if a value is missing or not finite, which JSON writes as null.
    fn get(&self, name: &str) -> Option<f64> {
        self.numbers.get(name).and_then(Value::as_f64)
    }
}

/// The journals of a run.
struct Run {
    folder: PathBuf,
    steps: Vec<Line>,
    valid: Vec<Line>,
    damaged: usize,
}

/// Draws the curves.
///
/// # Errors
/// [`Error::Usage`] when the output would replace a file that is no plot, [`Error::Input`] for a folder without a run or a run
/// without steps, [`Error::Io`] when a file cannot be read or written.
pub fn plot(plot: &Plot) -> Result<PlotReport> {
    let is_svg = is_svg(&plot.output)?;
    check_output(plot)?;
    let runs = plot.runs.iter().map(|folder| Run::read(folder)).collect::<Result<Vec<_>>>()?;
    let svg = drawn(&runs, plot, is_svg);
    let text = if is_svg { svg } else { page(&runs, &svg) };
    write_file(&plot.output, text.as_bytes()).map_err(|source| Error::io(&plot.output, source))?;
    let runs = runs.iter().map(Run::report).collect();
    Ok(PlotReport { output: plot.output.clone(), bytes: text.len() as u64, runs })
}

fn is_svg(output: &Path) -> Result<bool> {
    match output.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(true),
        Some("html" | "htm") => Ok(false),
        _ => Err(Error::usage(
            format!("{}: a plot is an .html or .svg file", output.display()),
            "give a name that ends in .html or .svg",
        )),
    }
}

/// Refuses to replace a file that another program has written.
fn check_output(plot: &Plot) -> Result<()> {
    let mut file = match fs::File::open(&plot.output) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(&plot.output, error)),
    };
    let mut begin = Vec::new();
    (&mut file).take(100).read_to_end(&mut begin).map_err(|error| Error::io(&plot.output, error))?;
    match plot.overwrite || begin.windows(MARK.len()).any(|bytes| bytes == MARK.as_bytes()) {
        true => Ok(()),
        false => Err(Error::usage(
            format!("{} exists and is no plot", plot.output.display()),
            "give another --output, or --overwrite",
        )),
    }
}

impl Run {
    fn read(folder: &Path) -> Result<Self> {
        let mut damaged = 0;
        let steps = lines(&folder.join(STEPS), &mut damaged)?;
        let valid = lines(&folder.join(VALID), &mut damaged)?;
        let failed = |reason: &str, help: &str| Error::Input {
            file: folder.display().to_string(),
            row: None,
            reason: reason.to_owned(),
            help: Some(help.to_owned()),
        };
        let (Some(steps), valid) = (steps, valid.unwrap_or_default()) else {
            let help = "give the folder that elmo train writes to with --output";
            return Err(failed(&format!("no folder of a run: it has no {STEPS}"), help));
        };
        if steps.is_empty() && valid.is_empty() {
            return Err(failed("the run has no steps yet", "a line is written every --log-every steps of elmo train"));
        }
        Ok(Self { folder: folder.to_owned(), steps, valid, damaged })
    }

    fn report(&self) -> PlottedRun {
        let perplexities = self.valid.iter().filter_map(|line| line.get("perplexity"));
        PlottedRun {
            run: self.folder.clone(),
            steps: self.steps.iter().chain(&self.valid).map(|line| line.step).max().unwrap_or_default(),
            step_lines: self.steps.len(),
            measurements: self.valid.len(),
            perplexity: perplexities.min_by(f64::total_cmp),
            damaged_lines: self.damaged,
        }
    }

    fn name(&self) -> String {
        let name = self.folder.display().to_string();
        match name.chars().count().checked_sub(NAME) {
            Some(more) if more > 0 => format!("…{}", name.chars().skip(more + 1).collect::<String>()),
            _ => name,
        }
    }
}

/// The lines of a journal by their steps; `None` if there is no such file.
fn lines(path: &Path, damaged: &mut usize) -> Result<Option<Vec<Line>>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path, error)),
    };
    let mut lines = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let numbers = serde_json::from_slice::<Map<String, Value>>(line).ok();
        let step = |numbers: &Map<String, Value>| numbers.get("step").and_then(Value::as_u64);
        match numbers.and_then(|numbers| Some(Line { step: step(&numbers)?, numbers })) {
            Some(line) => lines.push(line),
            None => *damaged += 1,
        }
    }
    lines.sort_by_key(|line| line.step);
    Ok(Some(lines))
}

/// The values of lines over steps or epochs.
fn points(lines: &[Line], over: Over, of: impl Fn(&Line) -> Option<f64>) -> Vec<(f64, f64)> {
    let x = |line: &Line| match over {
        Over::Steps => Some(line.step as f64),
        Over::Epochs => line.get("epoch"),
    };
    lines.iter().filter_map(|line| Some((x(line)?, of(line)?))).collect()
}

/// The exponential moving average, without the bias towards 0 at the beginning.
fn smoothed(points: &[(f64, f64)], weight: f64) -> Vec<(f64, f64)> {
    let (mut sum, mut weights) = (0.0, 0.0);
    let mut next = |&(x, y): &(f64, f64)| {
        (sum, weights) = (weight * sum + (1.0 - weight) * y, weight * weights + (1.0 - weight));
        (x, sum / weights)
    };
    points.iter().map(&mut next).collect()
}

/// The charts that have values.
fn charts(runs: &[Run], plot: &Plot) -> Vec<Chart> {
    let loss = |softmax: &'static str| {
        move |line: &Line| line.get("loss").filter(|_| line.numbers.get("softmax").is_some_and(|s| s == softmax))
    };
    let speed = |line: &Line| Some(line.get("tokens")? / line.get("seconds").filter(|seconds| *seconds > 0.0)?);
    let above_zero = |name: &'static str| move |line: &Line| line.get(name).filter(|value| *value > 0.0);
    let chart = |title: &str, curves: Vec<Curve>| Chart { title: title.to_owned(), is_log: false, curves };
    let steps = |weight: f64, of: &dyn Fn(&Line) -> Option<f64>| {
        let curves = runs.iter().enumerate().flat_map(|(run, journal)| {
            let raw = points(&journal.steps, plot.over, of);
            let smooth = smoothed(&raw, weight);
            let curve = |stroke, points| Curve { name: journal.name(), run, stroke, points };
            let pale = (weight > 0.0).then(|| curve(Stroke::Pale, raw));
            pale.into_iter().chain([curve(Stroke::Solid, smooth)])
        });
        curves.collect()
    };
    let perplexity = [
        ("perplexity_forward", Stroke::Dashed, " forward"),
        ("perplexity_backward", Stroke::Dotted, " backward"),
        ("perplexity", Stroke::Solid, ""),
    ];
    let held_out = runs.iter().enumerate().flat_map(|(run, journal)| {
        perplexity.map(|(name, stroke, direction)| {
            let points = points(&journal.valid, plot.over, above_zero(name));
            Curve { name: format!("{}{direction}", journal.name()), run, stroke, points }
        })
    });
    let mut charts = vec![
        chart("training loss, over all words", steps(plot.smoothing, &loss("full"))),
        chart(
            "training loss, sampled softmax: not comparable with held-out perplexity",
            steps(plot.smoothing, &loss("sampled")),
        ),
        Chart {
            title: "held-out perplexity: average (solid), forward (dashed), backward (dotted)".to_owned(),
            is_log: true,
            curves: held_out.collect(),
        },
        chart("learning rate", steps(0.0, &|line| line.get("learning_rate"))),
        chart("norm of the gradients before clipping", steps(plot.smoothing, &|line| line.get("grad_norm"))),
        chart("tokens/s in each direction", steps(plot.smoothing, &speed)),
    ];
    for chart in &mut charts {
        chart.curves.retain(|curve| !curve.points.is_empty());
    }
    charts.retain(|chart| !chart.curves.is_empty());
    charts
}

/// The picture as an SVG element, or as a file of its own.
fn drawn(runs: &[Run], plot: &Plot, is_file: bool) -> String {
    let charts = charts(runs, plot);
    let ends = charts.iter().flat_map(|chart| &chart.curves).filter_map(|curve| curve.points.last());
    let end = ends.map(|point| point.0).fold(0.0, f64::max).max(1e-9);
    let top = LEGEND_LINE * (runs.len() + 1) as f64;
    let (width, height) = (LEFT + WIDTH + 30.0, top + CHART * charts.len() as f64 + LEGEND_LINE);
    let mut svg = if is_file { MARK.to_owned() } else { String::new() };
    let space = if is_file { " xmlns=\"http://www.w3.org/2000/svg\"" } else { "" };
    let _ = writeln!(
        svg,
        "<svg{space} viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" aria-label=\"curves of training\">\n<style>\n\
         svg {{ font: 13px system-ui, sans-serif; color: #222; --paper: #fff; }}\n\
         @media (prefers-color-scheme: dark) {{ svg {{ color: #ddd; --paper: #1a1a1a; }} }}\n\
         svg text {{ fill: currentColor; }}\n.paper {{ fill: var(--paper); }}\n\
         .grid {{ stroke: currentColor; stroke-opacity: 0.15; }}\n\
         .curve {{ fill: none; stroke-width: 1.8; stroke-linecap: round; stroke-linejoin: round; }}\n</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>"
    );
    for (number, run) in runs.iter().enumerate() {
        let y = LEGEND_LINE * (number + 1) as f64;
        let _ = writeln!(
            svg,
            "<path class=\"curve\" stroke=\"{}\" d=\"M{LEFT} {}h30\"/><text x=\"{}\" y=\"{y}\">{}</text>",
            colour(number),
            y - 4.0,
            LEFT + 40.0,
            escaped(&run.name())
        );
    }
    for (number, chart) in charts.iter().enumerate() {
        chart.draw(&mut svg, top + CHART * number as f64 + 40.0, end);
    }
    let axis = if plot.over == Over::Steps { "steps" } else { "epochs" };
    let (x, y) = (LEFT + WIDTH / 2.0, height - 8.0);
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{axis}</text>\n</svg>");
    svg
}

/// The picture below a table of the runs.
fn page(runs: &[Run], svg: &str) -> String {
    let mut page = picture::page("elmo plot", MARK);
    page += "<h1>Training</h1>\n<table>\n<tr><th align=\"left\">run</th><th align=\"right\">steps</th>\
             <th align=\"right\">lowest held-out perplexity</th></tr>\n";
    for run in runs {
        let report = run.report();
        let perplexity = report.perplexity.map_or("-".to_owned(), |perplexity| format!("{perplexity:.3}"));
        let (name, steps) = (escaped(&run.name()), count(report.steps));
        let numbers = [steps, perplexity].map(|number| format!("<td align=\"right\">{number}</td>")).concat();
        let _ = writeln!(page, "<tr><td>{name}</td>{numbers}</tr>");
    }
    page + "</table>\n" + svg + "</html>\n"
}

impl fmt::Display for PlotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![("plot", format!("{}, {}", self.output.display(), bytes(self.bytes)))];
        for run in &self.runs {
            let perplexity = run.perplexity.map_or(String::new(), |lowest| format!(", lowest perplexity {lowest:.3}"));
            let (lines, measurements) = (count(run.step_lines as u64), count(run.measurements as u64));
            let (name, steps) = (run.run.display(), count(run.steps));
            rows.push((
                "run",
                format!("{name}: {steps} steps in {lines} lines, {measurements} measurements{perplexity}"),
            ));
            if run.damaged_lines > 0 {
                rows.push(("damaged lines", format!("{} of this run, left out", count(run.damaged_lines as u64))));
            }
        }
        f.write_str(&table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(folder: &Path, name: &str) -> Plot {
        let (runs, output) = (vec![folder.to_owned()], folder.join(name));
        Plot { runs, output, over: Over::Steps, smoothing: 0.0, overwrite: false }
    }

    /// By hand: losses 1, 9, 1 at steps 0, 50, 100 without smoothing. The first chart begins 80 pixels below the top: the legend
    /// has two lines of 20, the title 40. So 9 of an axis to 10 is at 80 + 200 / 10.
    #[test]
    fn a_run_is_drawn_and_damaged_lines_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("a & <b>");
        fs::create_dir(&run).unwrap();
        let line = |step: u64, loss: f64| {
            format!("{{\"step\":{step},\"loss\":{loss},\"softmax\":\"sampled\",\"epoch\":{step}e-2}}\n")
        };
        let lines =
            [line(0, 1.0), line(50, 9.0), "no JSON\n".to_owned(), line(100, 1.0), "{\"step\":110,\"lo".to_owned()];
        fs::write(run.join(STEPS), lines.concat()).unwrap();
        let valid =
            "{\"step\":100,\"epoch\":1,\"perplexity\":50.5,\"perplexity_forward\":null,\"perplexity_backward\":52}\n";
        fs::write(run.join(VALID), valid).unwrap();
        for over in [Over::Steps, Over::Epochs] {
            let report = plot(&Plot { over, ..of(&run, "a.svg") }).unwrap();
            let run = &report.runs[0];
            assert_eq!((run.steps, run.step_lines, run.measurements, run.damaged_lines), (100, 3, 1, 2));
            assert_eq!(run.perplexity, Some(50.5));
            let svg = fs::read_to_string(&report.output).unwrap();
            assert!(svg.contains("d=\"M80.0 260.0L480.0 100.0L880.0 260.0h0\""), "{svg}");
            assert!(svg.contains("a &amp; &lt;b&gt;</text>") && svg.contains("sampled softmax"), "{svg}");
            // Loss, average and backward perplexity, and the line of the legend.
            assert_eq!(svg.matches("class=\"curve\"").count(), 4, "{svg}");
            assert!(
                !svg.contains("<b>") && !svg.contains("over all words") && !svg.contains("NaN") && !svg.contains("inf"),
                "{svg}"
            );
        }
    }

    /// By hand: with weight 0.5, the second of 0 and 3 is (0.5 x 3 + 0.25 x 0) / 0.75.
    #[test]
    fn smoothing_has_no_bias() {
        let points = [(1.0, 0.0), (2.0, 3.0)];
        assert_eq!(smoothed(&points, 0.5), [(1.0, 0.0), (2.0, 2.0)]);
        assert_eq!(smoothed(&points, 0.0), points);
        assert_eq!(smoothed(&[(1.0, 4.0), (2.0, 4.0)], 0.9)[0].1, 4.0);
    }

    /// A million steps: at most two points for each of 800 columns and the last one, raw and smoothed.
    #[test]
    fn the_file_of_a_long_run_is_small() {
        let folder = tempfile::tempdir().unwrap();
        let line =
            |step: u64| format!("{{\"step\":{step},\"loss\":{},\"softmax\":\"full\"}}\n", (step % 977) as f64 / 7.0);
        fs::write(folder.path().join(STEPS), (0..100_000).map(line).collect::<String>()).unwrap();
        let report = plot(&Plot { smoothing: 0.9, ..of(folder.path(), "a.html") }).unwrap();
        assert!(report.bytes < 70_000, "{}", report.bytes);
        let html = fs::read_to_string(&report.output).unwrap();
        assert!(!html.contains("http") && html.matches('L').count() <= 2 * 2 * 801, "{}", html.matches('L').count());
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let reason = |plot_: &Plot| plot(plot_).unwrap_err().to_string();
        assert!(reason(&of(folder.path(), "a.html")).contains("no folder of a run"));
        fs::write(folder.path().join(STEPS), "").unwrap();
        assert!(reason(&of(folder.path(), "a.html")).contains("no steps yet"));
        assert!(reason(&of(folder.path(), "a.png")).contains(".html or .svg"));
        fs::write(folder.path().join(STEPS), "{\"step\":1,\"loss\":2,\"softmax\":\"full\"}\n").unwrap();
        fs::write(folder.path().join("a.html"), "<!DOCTYPE html>\nmine").unwrap();
        assert!(reason(&of(folder.path(), "a.html")).contains("is no plot"));
        plot(&Plot { overwrite: true, ..of(folder.path(), "a.html") }).unwrap();
        plot(&of(folder.path(), "a.html")).unwrap();
        plot(&of(folder.path(), "a.svg")).unwrap();
        plot(&of(folder.path(), "a.svg")).unwrap();
    }
}
