//! The memory of this machine, or of the container in which the process runs.

use std::{fs, path::Path};

use serde::Serialize;

/// Memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Installed memory.
    pub total: u64,
    /// Memory that a new program can use without swapping.
    pub available: u64,
}

impl Memory {
    /// `None` except on Linux.
    pub fn now() -> Option<Self> {
        let memory = parse(&fs::read_to_string("/proc/meminfo").ok()?)?;
        Some(limit().map_or(memory, |limit| memory.within(limit)))
    }

    /// With the limit of a control group, and the part of it that is used.
    fn within(self, (most, used): (u64, u64)) -> Self {
        Self { total: self.total.min(most), available: self.available.min(most.saturating_sub(used)) }
    }
}

/// Reads `MemTotal` and `MemAvailable`, which the kernel gives in KiB.
fn parse(meminfo: &str) -> Option<Memory> {
    let read = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(Memory { total: read("MemTotal:")?, available: read("MemAvailable:")? })
}

/// The limit of the control group of this process (version 2), and the part of it that is used without files, which the kernel can
/// drop.
fn limit() -> Option<(u64, u64)> {
    let group = fs::read_to_string("/proc/self/cgroup").ok()?;
    let folder = Path::new("/sys/fs/cgroup").join(group.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let read = |file: &str| fs::read_to_string(folder.join(file)).ok();
    let most = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let files = read("memory.stat")
        .and_then(|stat| stat.lines().find_map(|line| line.strip_prefix("file "))?.trim().parse().ok());
    Some((most, used.saturating_sub(files.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_parsed_from_meminfo() {
        // The first lines of /proc/meminfo as proc(5) describes them.
        let text = "MemTotal:       16315096 kB\nMemFree:          330364 kB\nMemAvailable:    8155044 kB\n";
        assert_eq!(parse(text), Some(Memory { total: 16_315_096 * 1024, available: 8_155_044 * 1024 }));
        assert_eq!(parse("MemTotal: ? kB"), None);
    }

    #[test]
    fn a_container_has_what_its_limit_leaves() {
        let machine = Memory { total: 100, available: 60 };
        assert_eq!(machine.within((50, 20)), Memory { total: 50, available: 30 });
        assert_eq!(machine.within((50, 70)), Memory { total: 50, available: 0 });
        assert_eq!(machine.within((1000, 1)), machine);
    }
}
