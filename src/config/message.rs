//! Error texts with placeholders for settings, because the command line and the API have different names for a setting.

use std::borrow::Cow;
use std::fmt;

/// Setting that an error text mentions; its `Display` is the name on the command line and in YAML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The setting that the error is about.
    This,
    Pipeline,
    Images,
    Audio,
    Video,
    ReferenceVideos,
    /// Time span of a retake.
    Span,
    /// Start of the time span of a retake.
    SpanStart,
    /// End of the time span of a retake.
    SpanEnd,
    /// Mask of a region to regenerate.
    Mask,
    /// Duration of an extension.
    Extension,
    /// Option that extends the video before its start.
    ExtensionAtStart,
    Seconds,
    NumFrames,
    /// The setting with this YAML key.
    Key(&'static str),
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Setting::This => "this key",
            Setting::Pipeline => "--pipeline",
            Setting::Images => "--image PATH FRAME STRENGTH, or request.images",
            Setting::Audio => "--audio PATH, or request.audio",
            Setting::Video => "--video PATH, or request.video",
            Setting::ReferenceVideos => "--reference-video PATH, or request.reference_videos",
            Setting::Span => "--retake FROM TO, or request.retake",
            Setting::SpanStart => "from",
            Setting::SpanEnd => "to",
            Setting::Mask => "--mask PATH, --inpaint X Y W H or --outpaint X Y W H",
            Setting::Extension => "--extend SECONDS, or request.extend",
            Setting::ExtensionAtStart => "--extend-at start",
            Setting::Seconds => "--seconds",
            Setting::NumFrames => "--num-frames",
            Setting::Key(key) => key,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum MessagePart {
    Text(Cow<'static, str>),
    Setting(Setting),
}

/// Text of an error. `Display` writes settings with their names on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message(Vec<MessagePart>);

impl Message {
    /// Returns the text with each setting replaced by the name that `name` returns.
    pub fn with_names(&self, name: impl Fn(Setting) -> Cow<'static, str>) -> String {
        let text = |part: &MessagePart| match part {
            MessagePart::Text(text) => text.clone(),
            MessagePart::Setting(setting) => name(*setting),
        };
        self.0.iter().map(text).collect()
    }

    /// Returns the message followed by another message.
    #[must_use]
    pub(crate) fn then(mut self, more: impl Into<Message>) -> Self {
        self.0.append(&mut more.into().0);
        self
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            MessagePart::Text(text) => f.write_str(text),
            MessagePart::Setting(setting) => setting.fmt(f),
        })
    }
}

impl From<&'static str> for Message {
    fn from(text: &'static str) -> Self {
        Message(vec![MessagePart::Text(text.into())])
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        Message(vec![MessagePart::Text(text.into())])
    }
}

impl From<Setting> for Message {
    fn from(setting: Setting) -> Self {
        Message(vec![MessagePart::Setting(setting)])
    }
}

/// Joins texts, settings and messages into one [`Message`].
macro_rules! message {
    ($($part:expr),+ $(,)?) => { $crate::config::message::Message::default()$(.then($part))+ };
}
pub(crate) use message;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_written_with_their_cli_or_api_names() {
        let message = message!["needs an image: ", Setting::Images, "; or remove ".to_string(), Setting::This];
        assert_eq!(
            message.to_string(),
            "needs an image: --image PATH FRAME STRENGTH, or request.images; or remove this key"
        );
        let api = message.with_names(|setting| if setting == Setting::This { "this field" } else { "images" }.into());
        assert_eq!(api, "needs an image: images; or remove this field");
    }
}
