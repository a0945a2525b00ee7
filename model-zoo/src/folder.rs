//! A model folder: plain file names only, and nothing outside it is read.
//!
//! A hub cache keeps its files as links, `…/snapshots/<rev>/config.json → ../../blobs/<hash>`; in a
//! folder named like that, links may lead anywhere below the folder that holds `snapshots`.
//! Everywhere else a link out of the folder is refused, since a model folder may come from anyone.

use std::{
    fs::File,
    io::{ErrorKind, Read},
    path::{Component, Path, PathBuf},
};

use crate::error::{LoadError, check_limit, quoted};

/// A folder with a model in it.
#[derive(Debug, Clone)]
pub struct ModelFolder {
    path: PathBuf,
    /// Canonical folder that every file must stay below.
    boundary: PathBuf,
}

impl ModelFolder {
    /// Opens a folder.
    ///
    /// # Errors
    /// It does not exist, or is not a folder.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let canonical = path.canonicalize().map_err(|e| LoadError::io(path, e))?;
        if !canonical.is_dir() {
            return Err(LoadError::malformed(path, "is not a folder"));
        }
        let snapshots = canonical.parent().filter(|p| p.file_name() == Some("snapshots".as_ref()));
        let boundary = match snapshots.and_then(Path::parent) {
            Some(repository) => repository.to_owned(),
            None => canonical,
        };
        Ok(Self { path: path.to_owned(), boundary })
    }

    /// The folder's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file of the folder; `None` if there is none of that name.
    ///
    /// # Errors
    /// `name` is not a plain file name, is a link out of the folder, or is not a regular file.
    pub fn file(&self, name: &str) -> Result<Option<PathBuf>, LoadError> {
        let plain = matches!(
            Path::new(name).components().collect::<Vec<_>>()[..],
            [Component::Normal(part)] if part == name
        );
        // A backslash separates folders on Windows, and never belongs in a weight file's name.
        if !plain || name.contains(['\\', '\0']) {
            let problem = format!("{} is not a plain file name", quoted(name));
            return Err(LoadError::malformed(&self.path, problem));
        }
        let path = self.path.join(name);
        let target = match path.canonicalize() {
            Ok(target) => target,
            Err(e) if e.kind() == ErrorKind::NotFound && !path.is_symlink() => return Ok(None),
            Err(e) => return Err(LoadError::io(&path, e)),
        };
        if !target.starts_with(&self.boundary) {
            return Err(LoadError::malformed(&path, "is a link out of the model folder"));
        }
        if !target.is_file() {
            return Err(LoadError::malformed(&path, "is not a regular file"));
        }
        Ok(Some(path))
    }

    /// Reads a text file of at most `limit` bytes; `None` if there is none of that name.
    ///
    /// # Errors
    /// As for [`ModelFolder::file`]; or the file is over `limit`, unreadable or not UTF-8.
    pub fn read_text(&self, name: &str, limit: u64) -> Result<Option<String>, LoadError> {
        let Some(path) = self.file(name)? else { return Ok(None) };
        let mut file = File::open(&path).map_err(|e| LoadError::io(&path, e))?;
        let size = file.metadata().map_err(|e| LoadError::io(&path, e))?.len();
        check_limit(&path, "size in bytes", size, limit)?;
        let mut bytes = Vec::new();
        file.by_ref().take(limit).read_to_end(&mut bytes).map_err(|e| LoadError::io(&path, e))?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(e) => {
                let at = e.utf8_error().valid_up_to();
                Err(LoadError::malformed(&path, format!("is not UTF-8 at byte {at}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_plain_names_are_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.json"), "{}").unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let folder = ModelFolder::open(dir.path()).unwrap();
        assert_eq!(folder.file("a.json").unwrap(), Some(dir.path().join("a.json")));
        assert_eq!(folder.file("b.json").unwrap(), None);
        let absolute = dir.path().join("a.json").display().to_string();
        for name in ["", ".", "..", "../x", "./a.json", "sub/../a.json", "a.json/", "/", &absolute]
        {
            let error = folder.file(name).unwrap_err().to_string();
            assert!(error.contains("plain file name"), "{name}: {error}");
        }
        assert!(folder.file("a\\b").is_err() && folder.file("a\0b").is_err());
        assert!(folder.file("sub").unwrap_err().to_string().contains("regular file"));
    }

    #[test]
    fn texts_are_limited_and_utf8() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("big"), "12345").unwrap();
        fs::write(dir.path().join("latin"), b"caf\xe9").unwrap();
        let folder = ModelFolder::open(dir.path()).unwrap();
        assert_eq!(folder.read_text("big", 5).unwrap().as_deref(), Some("12345"));
        let error = folder.read_text("big", 4).unwrap_err().to_string();
        assert!(error.ends_with("size in bytes is 5; the limit is 4"), "{error}");
        let error = folder.read_text("latin", 10).unwrap_err().to_string();
        assert!(error.ends_with("is not UTF-8 at byte 3"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn x7_links_leave_the_folder_only_in_a_hub_cache() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let hub = dir.path().join("models--a--b");
        let snapshot = hub.join("snapshots/0123");
        let plain = dir.path().join("plain");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(hub.join("blobs")).unwrap();
        fs::create_dir(&plain).unwrap();
        fs::write(hub.join("blobs/hash"), "{}").unwrap();
        fs::write(dir.path().join("secret"), "s").unwrap();

        symlink("../../blobs/hash", snapshot.join("config.json")).unwrap();
        symlink("../../../secret", snapshot.join("escape")).unwrap();
        let folder = ModelFolder::open(&snapshot).unwrap();
        assert_eq!(folder.read_text("config.json", 9).unwrap().as_deref(), Some("{}"));
        assert!(folder.file("escape").unwrap_err().to_string().contains("link out"));

        symlink("../secret", plain.join("escape")).unwrap();
        symlink("nowhere", plain.join("dangling")).unwrap();
        fs::write(plain.join("real"), "r").unwrap();
        symlink("real", plain.join("inside")).unwrap();
        let folder = ModelFolder::open(&plain).unwrap();
        assert!(folder.file("escape").unwrap_err().to_string().contains("link out"));
        assert!(matches!(folder.file("dangling"), Err(LoadError::Io { .. })));
        assert_eq!(folder.read_text("inside", 9).unwrap().as_deref(), Some("r"));
    }
}
