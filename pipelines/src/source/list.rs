//! Expands the user's inputs to a list of files, in a deterministic order.

use std::{collections::HashSet, fmt, sync::Arc};

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, path::Path};

use super::{
    Compression, Format, SourceError, format,
    hive::{self, Partition},
    links,
    pipe::Pipe,
    reading::{Cells, Reading},
};
use crate::stores::{Location, Stores};

/// The input that stands for standard input.
pub const STDIN: &str = "-";

/// One file of the input.
#[derive(Debug, Clone)]
pub struct InputFile {
    /// Where it is; `None` for standard input.
    pub location: Option<Location>,
    /// Its format.
    pub format: Format,
    /// Its compression.
    pub compression: Compression,
    /// Compressed size in bytes; 0 for standard input.
    pub size: u64,
    /// The version of the file: the store's etag or, for local files and servers without etags, the time of the last
    /// change. The etag of a local file contains the inode, which differs after a backup is restored.
    pub version: Option<String>,
    /// Partition columns from the names of its folders, as in `year=2024/a.csv`.
    pub partitions: Vec<Partition>,
    /// Options for reading it.
    pub reading: Reading,
    /// Standard input only: the bytes that were read to infer the schema.
    pub(super) pipe: Arc<Pipe>,
}

impl fmt::Display for InputFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Some(location) => location.fmt(f),
            None => f.write_str(STDIN),
        }
    }
}

impl InputFile {
    /// Standard input, read as lines of text unless the format is given.
    pub(crate) fn stdin(reading: Reading) -> Self {
        Self {
            location: None,
            format: reading.format.unwrap_or(Format::Text),
            compression: Compression::None,
            size: 0,
            version: None,
            partitions: Vec::new(),
            reading,
            pipe: Arc::default(),
        }
    }

    /// A file that was found below the folder `root`.
    fn new(location: Location, meta: &ObjectMeta, root: &Path, reading: Reading) -> Result<Self, SourceError> {
        let name = meta.location.as_ref();
        let (format, compression) = match reading.format {
            Some(format) => (format, format::compression_of(name)),
            None => format::of_name(name).ok_or_else(|| SourceError::Unknown { file: location.to_string() })?,
        };
        let version = Some(version(&location, meta));
        let partitions = partitions(&location.path, root);
        Ok(Self {
            location: Some(location),
            format,
            compression,
            size: meta.size,
            version,
            partitions,
            reading,
            pipe: Arc::default(),
        })
    }

    /// How its rows are divided, if they are rows of cells.
    pub(super) fn cells(&self) -> Cells {
        self.reading.cells(self.format)
    }

    /// Whether `meta` describes the version that was listed.
    pub(super) fn is_still(&self, meta: &ObjectMeta) -> bool {
        let version = self.location.as_ref().map(|location| version(location, meta));
        (meta.size, version) == (self.size, self.version.clone())
    }
}

/// The partitions of a file: its folders below `root`, the folder that was given, and `root` itself and those above it as
/// long as they are partitions. So the columns are the same whether a folder, a pattern or the file is given.
fn partitions(file: &Path, root: &Path) -> Vec<Partition> {
    let parts: Vec<_> = file.parts().collect();
    let folders: Vec<&str> = parts.iter().take(parts.len().saturating_sub(1)).map(AsRef::as_ref).collect();
    let (above, below) = folders.split_at(root.parts_count().min(folders.len()));
    let plain = above.iter().rposition(|folder| Partition::of_folder(folder).is_none());
    let first = plain.map_or(0, |plain| plain + 1);
    hive::of_folders(above[first..].iter().chain(below).copied())
}

/// The files of some inputs.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// The files that are read, in this order.
    pub files: Vec<InputFile>,
    /// Files of input folders that are not read: their names, or those of the folders that they are in, begin with `_`,
    /// or their extensions are not known.
    pub left_out: Vec<String>,
}

/// Expands files, folders, patterns and URLs. Inputs keep the order in which they were given; what one of them expands
/// to is sorted by path. A file that was given twice, or once more through a link, is read once.
///
/// Folders are searched to any depth for files with a known extension. Names that begin with `_` are left out with
/// a warning. Hidden files, whose names begin with `.`, empty files with such names (`_SUCCESS`), manifests of
/// jobs, and everything below `output`, which may lie in an input folder, are left out silently.
///
/// # Errors
/// [`SourceError::Missing`] when nothing has this name or matches the pattern, [`SourceError::Empty`] when a folder
/// contains no file of a known format, [`SourceError::OnlyOutput`] when its files are those of the output,
/// [`SourceError::InOutput`] when it is in the output, [`SourceError::Unknown`] when a file's extension is not known,
/// [`SourceError::Pattern`] when the pattern is invalid, [`SourceError::Store`] when the address is wrong or the store
/// fails.
pub async fn listing(
    stores: &Stores,
    inputs: &[String],
    output: Option<&Location>,
    reading: Reading,
) -> Result<Listing, SourceError> {
    let mut listing = Listing::default();
    let mut seen = HashSet::new();
    for input in inputs {
        let expanded = expand(stores, input, output, reading).await?;
        for file in expanded.files {
            if seen.insert(file.to_string()) {
                listing.files.push(file);
            } else {
                tracing::warn!(file = %file, "listed twice, read once");
            }
        }
        listing.left_out.extend(expanded.left_out);
    }
    listing.files = links::without_links(listing.files);
    warn_left_out(&listing.left_out);
    Ok(listing)
}

/// The files of [`listing`], read as their names say.
///
/// # Errors
/// As [`listing`].
pub async fn list(
    stores: &Stores,
    inputs: &[String],
    output: Option<&Location>,
) -> Result<Vec<InputFile>, SourceError> {
    listing(stores, inputs, output, Reading::default()).await.map(|listing| listing.files)
}

/// Number of names of left-out files that a warning lists.
const NAMED: usize = 3;

fn warn_left_out(names: &[String]) {
    if names.is_empty() {
        return;
    }
    let more = if names.len() > NAMED { ", …" } else { "" };
    let first = format!("{}{more}", names[..names.len().min(NAMED)].join(", "));
    tracing::warn!(
        files = names.len(),
        names = first,
        "files of an input folder are not read, as their names begin with _ or have no known extension; a pattern such as \
         'logs/_*.jsonl' takes names with _"
    );
}

/// Number of files that are checked at the same time.
const CONCURRENT_CHECKS: usize = 16;

/// Checks that files are still what they were when they were listed. Every answer of an HTTP server is compared when it
/// comes, and standard input has no other state.
///
/// # Errors
/// [`SourceError::Changed`] when one is not, [`SourceError::Store`] when the store fails.
pub async fn check_unchanged(files: impl Iterator<Item = &InputFile>) -> Result<(), SourceError> {
    let check = |file: &InputFile| {
        let file = file.clone();
        async move {
            let Some(location) = file.location.clone().filter(|location| !location.is_http()) else { return Ok(()) };
            match location.head().await?.is_some_and(|meta| file.is_still(&meta)) {
                true => Ok(()),
                false => Err(SourceError::Changed { file: file.to_string() }),
            }
        }
    };
    futures::stream::iter(files).map(check).buffer_unordered(CONCURRENT_CHECKS).try_collect().await
}

/// Refuses to write over a file of the input, also through a link.
///
/// # Errors
/// [`SourceError::Replaced`] when the output is one of the files.
pub fn check_kept(files: &[InputFile], output: &Location) -> Result<(), SourceError> {
    let is_output = |file: &&InputFile| file.location.as_ref().is_some_and(|location| location.is_same(output));
    match files.iter().find(is_output) {
        Some(file) => Err(SourceError::Replaced { file: file.to_string() }),
        None => Ok(()),
    }
}

/// Whether an input would also read this file, if it existed.
///
/// # Errors
/// [`SourceError::Store`] when the input is no address.
pub fn would_read(stores: &Stores, input: &str, file: &Location) -> Result<bool, SourceError> {
    if input == STDIN {
        return Ok(false);
    }
    let location = stores.locate(input)?;
    if !is_same_store(&location, file) {
        return Ok(false);
    }
    if pattern_root(&location.path).is_some() && !folder_exists(&location) {
        let pattern = glob::Pattern::new(location.path.as_ref());
        return Ok(pattern.is_ok_and(|pattern| pattern.matches_with(file.path.as_ref(), MATCHING)));
    }
    let is_left_out = |name: &str| name.starts_with(['.', '_']);
    let Some(mut below) = file.path.prefix_match(&location.path) else { return Ok(false) };
    Ok(!below.any(|part| is_left_out(part.as_ref())) && format::of_name(file.path.as_ref()).is_some())
}

/// See [`InputFile::version`].
fn version(location: &Location, meta: &ObjectMeta) -> String {
    let etag = meta.e_tag.as_deref().filter(|_| location.local_path().is_none());
    // Azure quotes the etag in responses to requests for the file, but not in listings.
    etag.map_or_else(
        || meta.last_modified.to_rfc3339(),
        |etag| etag.trim_start_matches("W/").trim_matches('"').to_owned(),
    )
}

async fn expand(
    stores: &Stores,
    input: &str,
    output: Option<&Location>,
    reading: Reading,
) -> Result<Listing, SourceError> {
    let single = |file: InputFile| Listing { files: vec![file], left_out: Vec::new() };
    if input == STDIN {
        return Ok(single(InputFile::stdin(reading)));
    }
    let location = stores.locate(input)?;
    if location.is_http() {
        // HTTP servers do not list files, and a star may be part of a name.
        return Ok(single(served(&location, input, reading).await?));
    }
    let found = location.local_path().and_then(|path| path.metadata().ok());
    if found.is_some_and(|found| !found.is_file() && !found.is_dir()) {
        // Checked before the file is opened: opening a pipe blocks until it has a writer.
        return Err(SourceError::NoFile { file: input.to_owned() });
    }
    if !is_folder_spelling(input)
        && let Some(meta) = location.head().await?
    {
        if belongs_to(&location, &meta.location, output) {
            return Err(SourceError::InOutput { file: input.to_owned() });
        }
        let folder = folder_of(&location.path);
        return Ok(single(InputFile::new(location, &meta, &folder, reading)?));
    }
    // A folder may have a star in its name.
    let root = pattern_root(&location.path).filter(|_| !folder_exists(&location));
    let is_pattern = root.is_some();
    let folder = root.clone().unwrap_or_else(|| location.path.clone());
    let (mut listed, mut left_out) = match root {
        Some(root) => (matching(&location, root, input).await?, Vec::new()),
        None => below(&location, reading).await?,
    };
    let found = listed.len();
    listed.retain(|meta| !belongs_to(&location, &meta.location, output));
    left_out.retain(|meta| !belongs_to(&location, &meta.location, output));
    let left_out = left_out.iter().map(|meta| location.at(meta.location.clone()).to_string()).collect();
    if listed.is_empty() && found > 0 {
        return Err(match belongs_to(&location, &folder, output) {
            true => SourceError::InOutput { file: input.to_owned() },
            false => SourceError::OnlyOutput { address: input.to_owned() },
        });
    }
    if listed.is_empty() {
        return Err(match is_pattern {
            false if folder_exists(&location) => SourceError::Empty { address: input.to_owned() },
            _ => SourceError::Missing { address: input.to_owned() },
        });
    }
    let files = listed.iter().map(|meta| InputFile::new(location.at(meta.location.clone()), meta, &folder, reading));
    Ok(Listing { files: files.collect::<Result<_, _>>()?, left_out })
}

async fn served(location: &Location, input: &str, reading: Reading) -> Result<InputFile, SourceError> {
    let meta = location.head().await?.ok_or_else(|| SourceError::Missing { address: input.to_owned() })?;
    // After a redirect the response may name another path; the requested name determines the format.
    let folder = folder_of(&location.path);
    InputFile::new(location.clone(), &ObjectMeta { location: location.path.clone(), ..meta }, &folder, reading)
}

/// The folder of a file.
fn folder_of(file: &Path) -> Path {
    file.parts().take(file.parts_count().saturating_sub(1)).collect()
}

/// A trailing slash means a folder; `head` would ignore it.
fn is_folder_spelling(input: &str) -> bool {
    input.ends_with('/')
}

fn folder_exists(location: &Location) -> bool {
    location.local_path().is_some_and(|path| path.is_dir())
}

/// The folder of a job's manifest in its output.
pub(crate) const MANIFEST: &str = "_elmo";

/// Files of a folder, to any depth: those that are read, and those that are left out and worth a warning. If the format is
/// given, names need no known extension.
async fn below(folder: &Location, reading: Reading) -> Result<(Vec<ObjectMeta>, Vec<ObjectMeta>), SourceError> {
    fn is_searched(name: &str) -> bool {
        !name.starts_with('.') && name != MANIFEST
    }
    let depth = folder.path.parts_count();
    let listed = folder.below(&folder.path, usize::MAX, is_searched).await?;
    let parts = |meta: &ObjectMeta| -> Vec<String> {
        meta.location.parts().skip(depth).map(|part| part.as_ref().to_owned()).collect()
    };
    let listed = sorted(listed, |meta| {
        let is_marker = || meta.size == 0 && parts(meta).iter().any(|part| part.starts_with('_'));
        parts(meta).iter().all(|part| is_searched(part)) && !is_marker()
    });
    Ok(listed.into_iter().partition(|meta| {
        let is_known = reading.format.is_some() || format::of_name(meta.location.as_ref()).is_some();
        is_known && parts(meta).iter().all(|part| !part.starts_with('_'))
    }))
}

/// How a pattern matches.
const MATCHING: glob::MatchOptions =
    glob::MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// Files that match a pattern. Literal segments of the pattern may begin with `_`.
async fn matching(location: &Location, root: Path, input: &str) -> Result<Vec<ObjectMeta>, SourceError> {
    let text = location.path.as_ref();
    let pattern = glob::Pattern::new(text)
        .map_err(|e| SourceError::Pattern { pattern: input.to_owned(), reason: e.msg.to_owned() })?;
    // Only `**` matches several folders.
    let deepest = if text.contains("**") { usize::MAX } else { location.path.parts_count() - root.parts_count() };
    let listed = location.below(&root, deepest, |_| true).await?;
    Ok(sorted(listed, |meta| pattern.matches_with(meta.location.as_ref(), MATCHING)))
}

fn sorted(mut listed: Vec<ObjectMeta>, wanted: impl Fn(&ObjectMeta) -> bool) -> Vec<ObjectMeta> {
    listed.retain(wanted);
    listed.sort_by(|a, b| a.location.cmp(&b.location));
    listed.dedup_by(|a, b| a.location == b.location);
    listed
}

/// The folder above the first segment with a wildcard; `None` when there is no wildcard.
fn pattern_root(path: &Path) -> Option<Path> {
    let is_wild = |part: &str| part.contains(['*', '?', '[']);
    let fixed = path.parts().position(|part| is_wild(part.as_ref()))?;
    Some(path.parts().take(fixed).collect())
}

fn is_same_store(one: &Location, other: &Location) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(&one.store), Arc::as_ptr(&other.store))
}

/// Whether a file or folder is in the output folder or is that folder, by its path or by its canonical path.
fn belongs_to(location: &Location, path: &Path, output: Option<&Location>) -> bool {
    let Some(out) = output else { return false };
    let place = |location: &Location| location.local_path().and_then(|path| path.canonicalize().ok());
    let by_name = is_same_store(out, location) && path.prefix_matches(&out.path);
    let by_place = || match (place(&location.at(path.clone())), place(out)) {
        (Some(file), Some(out)) => file.starts_with(out),
        _ => false,
    };
    by_name || by_place()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path as FsPath};

    fn touch(root: &FsPath, names: &[&str]) {
        for name in names {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x\n").unwrap();
        }
    }

    async fn names(root: &FsPath, inputs: &[&str]) -> Result<Vec<String>, SourceError> {
        let stores = Stores::with_settings([]);
        let inputs: Vec<String> = inputs.iter().map(|i| format!("{}/{i}", root.display())).collect();
        let output = stores.locate(&format!("{}/out", root.display())).unwrap();
        let files = list(&stores, &inputs, Some(&output)).await?;
        let prefix = format!("{}/", root.canonicalize().unwrap().display());
        Ok(files.iter().map(|f| f.to_string().replace(&prefix, "")).collect())
    }

    #[tokio::test]
    async fn folders_patterns_and_order() {
        let dir = tempfile::tempdir().unwrap();
        touch(
            dir.path(),
            &[
                "b.txt",
                "a.txt",
                "a b [1].txt",
                "sub/c.csv",
                "sub/.hidden.txt",
                "_tmp/x.txt",
                "sub/notes.md",
                "out/p.parquet",
            ],
        );
        let all = ["a b [1].txt", "a.txt", "b.txt", "sub/c.csv"];
        assert_eq!(names(dir.path(), &[""]).await.unwrap(), all);
        assert_eq!(names(dir.path(), &["*.txt"]).await.unwrap(), ["a b [1].txt", "a.txt", "b.txt"]);
        assert_eq!(names(dir.path(), &["**/*.csv"]).await.unwrap(), ["sub/c.csv"]);
        assert_eq!(names(dir.path(), &["a b [1].txt"]).await.unwrap(), ["a b [1].txt"]);
        assert_eq!(names(dir.path(), &["_tmp/x.txt"]).await.unwrap(), ["_tmp/x.txt"]);
        assert_eq!(names(dir.path(), &["b.txt", "*.txt"]).await.unwrap(), ["b.txt", "a b [1].txt", "a.txt"]);
    }

    #[tokio::test]
    async fn a_folder_may_have_a_star_in_its_name() {
        let dir = tempfile::tempdir().unwrap();
        touch(dir.path(), &["st*r/a.txt", "star/b.txt", "s[1]/c.txt"]);
        assert_eq!(names(dir.path(), &["st*r"]).await.unwrap(), ["st*r/a.txt"]);
        assert_eq!(names(dir.path(), &["s[1]/"]).await.unwrap(), ["s[1]/c.txt"]);
        assert_eq!(names(dir.path(), &["st*r/*.txt"]).await.unwrap(), ["st*r/a.txt", "star/b.txt"]);
    }

    /// File systems allow names that object store paths do not.
    #[tokio::test]
    async fn names_and_links_that_nobody_asked_for_are_left_out() {
        use std::os::unix::{ffi::OsStrExt, fs::symlink};
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        touch(root, &["a.txt", "sub/b.txt", "sub/new\nline.txt", "new\nline/c.txt", "sub/deep/d.txt", "_elmo/e.txt"]);
        fs::write(root.join(std::ffi::OsStr::from_bytes(b"latin-\xe9.txt")), "x\n").unwrap();
        symlink(root, root.join("sub/up")).unwrap();
        symlink(root.join("sub/self"), root.join("sub/self")).unwrap();
        symlink(root.join("nowhere"), root.join("sub/nowhere")).unwrap();
        symlink(root.join("sub"), root.join("linked")).unwrap();
        let all = ["a.txt", "sub/b.txt", "sub/deep/d.txt"];
        assert_eq!(names(root, &[""]).await.unwrap(), all);
        assert_eq!(names(root, &["**/*.txt"]).await.unwrap().len(), all.len() + 1, "a pattern sees _elmo too");
        assert_eq!(names(root, &["*.txt"]).await.unwrap(), ["a.txt"]);
        assert_eq!(names(root, &["*/*.txt"]).await.unwrap(), ["_elmo/e.txt", "sub/b.txt"]);
        // A walk and a request for the file return the same version.
        let stores = Stores::with_settings([]);
        let files = list(&stores, &[root.display().to_string()], None).await.unwrap();
        check_unchanged(files.iter()).await.unwrap();
    }

    #[tokio::test]
    async fn what_a_folder_holds_and_is_not_read_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        touch(root, &["a.txt", "_data.jsonl", "_sub/b.txt", "c.md", "README", ".git/d.txt", ".e.txt", "_elmo/f.txt"]);
        fs::write(root.join("_SUCCESS"), "").unwrap();
        let stores = Stores::with_settings([]);
        let listed = async |input: &str| {
            let inputs = [format!("{}/{input}", root.display())];
            let listing = listing(&stores, &inputs, None, Reading::default()).await.unwrap();
            let name = |path: &str| path.rsplit_once('/').unwrap().1.to_owned();
            let files: Vec<_> = listing.files.iter().map(|file| name(&file.to_string())).collect();
            (files, listing.left_out.iter().map(|path| name(path)).collect::<Vec<_>>())
        };
        let (files, left_out) = listed("").await;
        assert_eq!(
            (files, left_out),
            (vec!["a.txt".into()], ["README", "_data.jsonl", "b.txt", "c.md"].map(str::to_owned).to_vec())
        );
        assert_eq!(listed("_*.jsonl").await, (vec!["_data.jsonl".into()], vec![]));
    }

    #[tokio::test]
    async fn a_file_is_read_once_whatever_links_lead_to_it() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        touch(root, &["in/b.txt", "in/z.txt", "else/c.txt"]);
        symlink(root.join("in/b.txt"), root.join("in/a.txt")).unwrap();
        symlink(root.join("else/c.txt"), root.join("in/c1.txt")).unwrap();
        symlink(root.join("in/c1.txt"), root.join("in/c2.txt")).unwrap();
        // Two names of equal right: a person made them on purpose.
        fs::hard_link(root.join("in/z.txt"), root.join("in/y.txt")).unwrap();
        assert_eq!(names(root, &["in"]).await.unwrap(), ["in/b.txt", "in/c1.txt", "in/y.txt", "in/z.txt"]);
        assert_eq!(names(root, &["in/a.txt"]).await.unwrap(), ["in/a.txt"]);
        assert_eq!(names(root, &["in/a.txt", "in/b.txt"]).await.unwrap(), ["in/b.txt"]);
    }

    /// A file that does not exist yet.
    #[test]
    fn what_an_input_would_read() {
        let dir = tempfile::tempdir().unwrap();
        touch(dir.path(), &["a.txt"]);
        let stores = Stores::with_settings([]);
        let path = |name: &str| format!("{}/{name}", dir.path().display());
        let reads =
            |input: &str, file: &str| would_read(&stores, &path(input), &stores.locate(&path(file)).unwrap()).unwrap();
        for (input, file) in [("", "new/b.json"), ("new", "new/b.json"), ("**/*.txt", "new/b.txt"), ("*/*", "new/b")] {
            assert!(reads(input, file), "{input} {file}");
        }
        for (input, file) in [
            ("", "_new/b.json"),
            ("", "new/.b.json"),
            ("", "new/b.md"),
            ("new", "newer/b.json"),
            ("a.txt", "b.txt"),
            ("*.txt", "new/b.txt"),
        ] {
            assert!(!reads(input, file), "{input} {file}");
        }
        let stdin = would_read(&stores, STDIN, &stores.locate(&path("-")).unwrap());
        assert!(!stdin.unwrap());
    }

    #[tokio::test]
    async fn a_folder_that_holds_the_output_alone_has_no_input() {
        let dir = tempfile::tempdir().unwrap();
        touch(dir.path(), &["out/p.parquet"]);
        for input in ["", "*/*.parquet"] {
            let error = names(dir.path(), &[input]).await.unwrap_err().to_string();
            assert!(error.ends_with("contains no input files other than those of the output"), "{error}");
        }
        for input in ["out", "out/", "out/*.parquet", "out/p.parquet"] {
            let found = names(dir.path(), &[input]).await;
            assert!(matches!(found, Err(SourceError::InOutput { .. })), "{input}: {found:?}");
        }
    }

    #[tokio::test]
    async fn what_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        touch(dir.path(), &["sub/notes.md"]);
        assert!(matches!(names(dir.path(), &["no.txt"]).await, Err(SourceError::Missing { .. })));
        assert!(matches!(names(dir.path(), &["*.txt"]).await, Err(SourceError::Missing { .. })));
        assert!(matches!(names(dir.path(), &["sub"]).await, Err(SourceError::Empty { .. })));
        assert!(matches!(names(dir.path(), &["sub/notes.md"]).await, Err(SourceError::Unknown { .. })));
        assert!(matches!(names(dir.path(), &["a[.txt"]).await, Err(SourceError::Pattern { .. })));
    }
}
