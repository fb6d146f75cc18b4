//! The long versions of the crash tests: every crash point many times, hundreds of kills at random instants, long storms and
//! outages. `scripts/torture` runs them; `scripts/services` does not.

use std::{
    any::Any,
    collections::BTreeMap,
    env,
    fmt::{self, Display},
    panic::{AssertUnwindSafe, catch_unwind},
    str::FromStr,
    sync::Mutex,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use super::{
    case::Case,
    crashes::{self, Crash, End, FILE_POINTS, TOPIC_POINTS, TRANSACTION_POINTS},
    dice::Dice,
    outage::{outages, short},
    starts,
    storm::{Into, Membership, storm},
};

/// Runs at a time: they wait for timeouts of the broker more than they compute.
const WORKERS: usize = 3;
/// Kills of one run, after which its output is checked.
const KILLS: usize = 10;

/// What to run, from the environment; `scripts/torture` documents it.
struct Plan {
    parts: Vec<String>,
    point: Option<String>,
    rounds: usize,
    kills: usize,
    events: usize,
    outages: usize,
    gone: Duration,
    seed: u64,
}

impl Plan {
    fn from_env() -> Self {
        let parts = env::var("TORTURE").unwrap_or_else(|_| "points,kills,storm,outage,gone".to_owned());
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let plan = Self {
            parts: parts.split(',').map(str::to_owned).collect(),
            point: env::var("TORTURE_POINT").ok(),
            rounds: number("TORTURE_ROUNDS", || 20),
            kills: number("TORTURE_KILLS", || 200),
            events: number("TORTURE_EVENTS", || 50),
            outages: number("TORTURE_OUTAGES", || 5),
            gone: Duration::from_secs(number("TORTURE_GONE", || 120)),
            seed: number("TORTURE_SEED", clock),
        };
        let known = ["points", "kills", "storm", "outage", "gone"];
        let unknown = plan.parts.iter().find(|part| !known.contains(&part.as_str()));
        assert_eq!(unknown, None, "TORTURE has a part that does not exist; the parts are {known:?}");
        plan
    }

    fn has(&self, part: &str) -> bool {
        self.parts.iter().any(|name| name == part)
    }
}

fn number<T: FromStr>(variable: &str, default: impl FnOnce() -> T) -> T {
    match env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")),
        Err(_) => default(),
    }
}

/// What became of all runs of one name.
#[derive(Default)]
struct Line {
    runs: usize,
    crashes: usize,
    messages: usize,
    seconds: f64,
    failures: Vec<String>,
}

/// The runs so far, by name.
#[derive(Default)]
struct Table(Mutex<BTreeMap<String, Line>>);

impl Table {
    /// Runs something that returns crashes and messages, and notes what became of it.
    fn run(&self, name: &str, seed: u64, run: impl FnOnce() -> (usize, usize)) {
        let began = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(run));
        let mut table = self.0.lock().unwrap();
        let line = table.entry(name.to_owned()).or_default();
        line.runs += 1;
        line.seconds += began.elapsed().as_secs_f64();
        match done {
            Ok((crashes, messages)) => {
                line.crashes += crashes;
                line.messages += messages;
            }
            Err(panic) => line.failures.push(format!("seed {seed}: {}", message(panic.as_ref()))),
        }
    }

    fn failed(&self) -> bool {
        self.0.lock().unwrap().values().any(|line| !line.failures.is_empty())
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.0.lock().unwrap();
        writeln!(f, "| runs of | runs | crashes | messages | failed | seconds |\n|---|---|---|---|---|---|")?;
        for (name, Line { runs, crashes, messages, seconds, failures }) in table.iter() {
            writeln!(f, "| {name} | {runs} | {crashes} | {messages} | {} | {seconds:.0} |", failures.len())?;
        }
        let all = table.iter().flat_map(|(name, line)| line.failures.iter().map(move |failure| (name, failure)));
        all.into_iter().try_for_each(|(name, failure)| writeln!(f, "\nFAILED {name}: {failure}"))
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// A run, and its name.
type Job<'j> = (String, u64, Box<dyn FnOnce() -> (usize, usize) + Send + 'j>);

/// Runs jobs, some at a time.
fn run_all(table: &Table, jobs: Vec<Job<'_>>) {
    let (total, began) = (jobs.len(), Instant::now());
    let jobs = Mutex::new(jobs.into_iter().enumerate());
    let next = || jobs.lock().unwrap().next();
    let work = || {
        while let Some((number, (name, seed, job))) = next() {
            eprintln!("{:5.0} s: {} of {total}, {name}, seed {seed}", began.elapsed().as_secs_f64(), number + 1);
            table.run(&name, seed, job);
        }
    };
    thread::scope(|scope| (0..WORKERS).for_each(|_| drop(scope.spawn(work))));
}

fn points(plan: &Plan, table: &Table) {
    let case = crashes::a_case("points");
    let (rows, messages) = (case.undisturbed(), case.undisturbed_messages());
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for round in 0..plan.rounds {
        let mut dice = Dice::of_run(plan.seed, round);
        let mut crash = |(point, most): (&'static str, usize)| {
            let end = if dice.below(2) == 0 { End::Abort } else { End::Kill };
            Crash { point, passes: dice.below(most + 1), end }
        };
        for crash in FILE_POINTS.map(&mut crash) {
            let (case, rows, name) = (&case, &rows, format!("{}-{round}", crash.point));
            let job = move || again(crash, |crash, name| crashes::in_files(case, rows, name, crash), &name, case);
            jobs.push((format!("point {}", crash.point), plan.seed, Box::new(job)));
        }
        for crash in TOPIC_POINTS.map(&mut crash) {
            // A group of its own: that of the files with this name has read everything.
            let (case, messages, name) = (&case, &messages, format!("topic-{}-{round}", crash.point));
            let job = move || again(crash, |crash, name| crashes::in_topic(case, messages, name, crash), &name, case);
            jobs.push((format!("point {}", crash.point), plan.seed, Box::new(job)));
        }
        let end = crash(("in_revoke", 0)).end;
        jobs.push(("point in_revoke".to_owned(), plan.seed, Box::new(move || (1, crashes::in_revocation(end)))));
    }
    if let Some(point) = &plan.point {
        jobs.retain(|(name, ..)| *name == format!("point {point}"));
        assert!(!jobs.is_empty(), "TORTURE_POINT: there is no point {point}");
        return run_all(table, jobs);
    }
    run_all(table, jobs);
    beginnings(plan, table);
    frozen(plan, table);
}

/// Crashes around the record of where a stream begins.
fn beginnings(plan: &Plan, table: &Table) {
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for _ in 0..plan.rounds {
        for crash in starts::crashes() {
            let name = format!("begin {}, {:?}", crash.point, crash.into);
            jobs.push((name, plan.seed, Box::new(move || (1, starts::crash_at_the_start(crash)))));
        }
    }
    run_all(table, jobs);
}

/// Crashes a stream. If it came to its end before, again after fewer passes.
fn again(mut crash: Crash, run: impl Fn(Crash, &str) -> bool, name: &str, case: &Case) -> (usize, usize) {
    while !run(crash, &format!("{name}-{}", crash.passes)) {
        assert_ne!(crash.passes, 0, "{name} was not reached");
        crash.passes /= 2;
    }
    (1, case.written.len())
}

/// Processes that stand still at a point until another one has their partitions.
fn frozen(plan: &Plan, table: &Table) {
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for _ in 0..plan.rounds.div_ceil(4) {
        for point in ["in_embed", "before_put", "after_put", "before_hint"] {
            let job = move || {
                let mut case = Case::new("frozen", 2, 60);
                crashes::frozen_in_files(&mut case, "out", point);
                (1, case.written.len())
            };
            jobs.push((format!("frozen {point}"), plan.seed, Box::new(job)));
        }
        for (point, _) in TRANSACTION_POINTS {
            let job = move || {
                let mut case = Case::new("frozen", 2, 60);
                let target = case.broker.topic("frozen-out", 2);
                crashes::frozen_in_topic(&mut case, &target, "out", point);
                (1, case.written.len())
            };
            jobs.push((format!("frozen {point}"), plan.seed, Box::new(job)));
        }
    }
    run_all(table, jobs);
}

/// Half of the kills hit a stream into files, half a stream into a topic.
fn kills(plan: &Plan, table: &Table) {
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for run in 0..plan.kills.div_ceil(KILLS) {
        let mut dice = Dice::of_run(plan.seed, run);
        let (name, job): (_, Box<dyn FnOnce() -> (usize, usize) + Send>) = match run % 2 {
            0 => ("kills, files", Box::new(move || (KILLS, crashes::kills_into_files(KILLS, &mut dice)))),
            _ => ("kills, topic", Box::new(move || (KILLS, crashes::kills_into_topic(KILLS, &mut dice)))),
        };
        jobs.push((name.to_owned(), plan.seed, job));
    }
    run_all(table, jobs);
}

fn storms(plan: &Plan, table: &Table) {
    let all = [Membership::Cooperative, Membership::Consumer, Membership::Static]
        .into_iter()
        .flat_map(|membership| [(membership, Into::Files), (membership, Into::Topic)]);
    for (number, (membership, into)) in all.enumerate() {
        let name = format!("storm, {membership:?}, {into:?}");
        table.run(&name, plan.seed, || {
            let tally = storm(membership, into, plan.events, &mut Dice::of_run(plan.seed, number));
            eprintln!("{name}: {tally:?}");
            (tally.ended + tally.killed + tally.frozen, tally.messages)
        });
    }
}

/// Prints a table, and fails if anything was lost or doubled, or hung.
#[test]
#[ignore = "takes half an hour; scripts/torture runs it"]
fn torture() {
    let (plan, table, began) = (Plan::from_env(), Table::default(), Instant::now());
    println!("TORTURE_SEED={}", plan.seed);
    if plan.has("points") {
        points(&plan, &table);
    }
    if plan.has("kills") {
        kills(&plan, &table);
    }
    if plan.has("storm") {
        storms(&plan, &table);
    }
    if plan.has("outage") {
        let all = || (plan.outages, outages(plan.outages, short, &mut Dice::new(plan.seed)));
        table.run("outages of the broker", plan.seed, all);
    }
    if plan.has("gone") {
        let name = format!("an outage of the broker of {} s", plan.gone.as_secs());
        table.run(&name, plan.seed, || (1, outages(1, |_| plan.gone, &mut Dice::new(plan.seed))));
    }
    println!("\nTORTURE_SEED={}, {} s\n\n{table}", plan.seed, Duration::as_secs(&began.elapsed()));
    assert!(!table.failed(), "failures are below the table");
}
