//! The memory of this machine, within the limits of this process's control groups.

/// Memory that this process shares with the rest of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMemory {
    /// Bytes in all: of the machine, or of the tightest control group.
    pub total: usize,
    /// Bytes this process may still take.
    pub available: usize,
}

impl SystemMemory {
    /// `bytes` of which nothing is taken.
    pub const fn unused(bytes: usize) -> Self {
        SystemMemory { total: bytes, available: bytes }
    }

    /// What the system says now; `None` where it does not.
    pub fn read() -> Option<Self> {
        Self::from_files(&|path| std::fs::read_to_string(path).ok())
    }

    /// From the system's files, each as `read` gives it.
    fn from_files(read: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let meminfo = read("/proc/meminfo")?;
        let bytes = |key: &str| -> Option<usize> {
            let line = meminfo.lines().find(|l| l.starts_with(key))?;
            line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
        };
        let mut memory =
            SystemMemory { total: bytes("MemTotal:")?, available: bytes("MemAvailable:")? };
        let number = |path: &str| read(path)?.trim().parse::<usize>().ok();
        for group in GroupFiles::of_process(read) {
            let Some(limit) = number(&group.limit) else { continue };
            memory.total = memory.total.min(limit);
            if let Some(used) = number(&group.used) {
                // Cached file pages, such as those of the model's own file, give way.
                let cached = read(&group.stat).and_then(|stat| inactive_file_bytes(&stat));
                let used = used.saturating_sub(cached.unwrap_or(0));
                memory.available = memory.available.min(limit.saturating_sub(used));
            }
        }
        memory.available = memory.available.min(memory.total);
        Some(memory)
    }

    /// Bytes others have taken.
    pub fn taken(&self) -> usize {
        self.total - self.available
    }
}

/// Those of a group and all below it, which version 1 tells apart from the group's own.
fn inactive_file_bytes(stat: &str) -> Option<usize> {
    let value =
        |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok());
    value("total_inactive_file ").or(value("inactive_file "))
}

/// Where a control group says how much memory it may take and has taken.
struct GroupFiles {
    limit: String,
    used: String,
    stat: String,
}

impl GroupFiles {
    /// Those of this process and of all groups above, as a limit on any of them applies; version 1
    /// and version 2.
    fn of_process(read: &dyn Fn(&str) -> Option<String>) -> Vec<Self> {
        let groups = read("/proc/self/cgroup").unwrap_or_default();
        let files = |root: &'static str, controller, [limit, used]: [&'static str; 2]| {
            groups_above(own_group(&groups, controller)).map(move |group| GroupFiles {
                limit: format!("{root}{group}/{limit}"),
                used: format!("{root}{group}/{used}"),
                stat: format!("{root}{group}/memory.stat"),
            })
        };
        let v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
        let v2 = ["memory.max", "memory.current"];
        let v1 = files("/sys/fs/cgroup/memory", "memory", v1);
        v1.chain(files("/sys/fs/cgroup", "", v2)).collect()
    }
}

/// The group of the process for `controller`, by `/proc/self/cgroup`, whose lines are
/// `id:controllers:path`; version 2 has no controllers there.
fn own_group<'a>(groups: &'a str, controller: &str) -> &'a str {
    let path = |line: &'a str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(path)
    };
    groups.lines().find_map(path).unwrap_or("/")
}

/// `group`, the ones above it, and the root as the empty path: inside a container the group is
/// usually mounted as the root, whatever its path is outside.
fn groups_above(group: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(group.trim_end_matches('/')), |group| {
        group.rsplit_once('/').map(|(above, _)| above)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:  600 kB\n";

    fn read(files: &[(&str, &str)]) -> Option<SystemMemory> {
        SystemMemory::from_files(&|path| {
            files.iter().find(|file| file.0 == path).map(|file| file.1.to_owned())
        })
    }

    #[test]
    fn without_groups_it_is_the_machines() {
        assert_eq!(read(&[]), None);
        let memory = read(&[("/proc/meminfo", MEMINFO)]).unwrap();
        assert_eq!(memory, SystemMemory { total: 1000 << 10, available: 600 << 10 });
        assert_eq!(memory.taken(), 400 << 10);
    }

    #[test]
    fn the_limit_of_any_ancestor_group_applies() {
        let groups = "1:name=x:/old\n0::/a/b\n";
        let base = [("/proc/meminfo", MEMINFO), ("/proc/self/cgroup", groups)];
        let with = |files: &[(&str, &str)]| read(&[&base[..], files].concat()).unwrap();
        let unlimited = with(&[("/sys/fs/cgroup/a/b/memory.max", "max\n")]);
        assert_eq!(unlimited.total, 1000 << 10);
        let limited = with(&[
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "204800\n"),
            ("/sys/fs/cgroup/a/memory.current", "102400\n"),
            ("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 51200\n"),
        ]);
        assert_eq!(limited, SystemMemory { total: 204_800, available: 204_800 - 51_200 });
        // A group may allow more than there is.
        let wide = with(&[
            ("/sys/fs/cgroup/memory.max", "99999999"),
            ("/sys/fs/cgroup/memory.current", "1"),
        ]);
        assert_eq!(wide, SystemMemory { total: 1000 << 10, available: 600 << 10 });
    }

    #[test]
    fn groups_of_version_1_count_too() {
        let memory = read(&[
            ("/proc/meminfo", MEMINFO),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "512000"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500000"),
            ("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 8000\n"),
        ]);
        assert_eq!(memory, Some(SystemMemory { total: 512_000, available: 20_000 }));
        // Of groups with a path of their own, all count that can be seen.
        let memory = read(&[
            ("/proc/meminfo", MEMINFO),
            ("/proc/self/cgroup", "5:cpu,memory:/a/b\n1:name=x:/c\n0::/c\n"),
            ("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712"),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "400000"),
            ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "390000"),
            ("/sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 5000\n"),
            ("/sys/fs/cgroup/memory/c/memory.limit_in_bytes", "1"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "512000"),
        ]);
        assert_eq!(memory, Some(SystemMemory { total: 400_000, available: 15_000 }));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_what_it_has() {
        let memory = SystemMemory::read().expect("Linux says");
        assert!(0 < memory.available && memory.available <= memory.total, "{memory:?}");
    }
}
