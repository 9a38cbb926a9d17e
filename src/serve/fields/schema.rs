//! JSON Schema for the request fields, for the OpenAPI document.

use serde_json::{Map, Value, json};

use super::table::{FIELDS, FieldEffect, FieldKind, Spec, WRAPPERS};

impl Spec {
    /// Returns the schema of the field's value. The schema does not mention that values are also accepted as text.
    pub fn schema(&self) -> Value {
        let contents =
            json!({"type": "string", "description": "A data URL or base64; in a multipart form also a file part."});
        let item = |more: Value| json!({"anyOf": [contents, more]});
        let list = |items: Value| json!({"type": "array", "items": items});
        if let FieldEffect::Neutral(values) = self.place {
            return if values.is_empty() { json!({"type": "null"}) } else { json!({"enum": values}) };
        }
        match self.kind {
            FieldKind::Text(most) => json!({"type": "string", "maxLength": most}),
            FieldKind::Word(most) => json!({"type": "string", "maxLength": most}),
            FieldKind::Integer(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
            FieldKind::Number(least, most) => json!({"type": "number", "minimum": least, "maximum": most}),
            FieldKind::Flag => json!({"type": "boolean"}),
            FieldKind::Seed => json!({"type": "integer", "minimum": -1, "maximum": u64::MAX}),
            FieldKind::Frames => json!({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
            FieldKind::Seconds => json!({"type": ["number", "string"], "exclusiveMinimum": 0, "maximum": 3600}),
            FieldKind::Size => json!({"type": "string", "pattern": "^(auto|[0-9]{2,5}x[0-9]{2,5})?$"}),
            FieldKind::Numbers => list(json!({"type": "number"})),
            FieldKind::Integers => list(json!({"type": "integer", "minimum": 0})),
            FieldKind::Rectangle => {
                json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 4, "maxItems": 4})
            }
            FieldKind::Image => json!({"anyOf": [contents, image(), list(item(image()))]}),
            FieldKind::Images => list(item(image())),
            FieldKind::Sound => item(members(&[
                ("data", json!({"type": "string"})),
                ("file", json!({"type": "string"})),
                ("start", json!({"type": "number", "minimum": 0})),
                ("duration", json!({"type": "number", "exclusiveMinimum": 0})),
            ])),
            FieldKind::Mask => {
                item(members(&[("data", json!({"type": "string"})), ("file", json!({"type": "string"}))]))
            }
            FieldKind::Video => item(members(&[
                ("id", json!({"type": "string"})),
                ("data", json!({"type": "string"})),
                ("file", json!({"type": "string"})),
            ])),
            FieldKind::Videos => list(item(members(&[
                ("data", json!({"type": "string"})),
                ("file", json!({"type": "string"})),
                ("strength", unit()),
                ("attention_strength", unit()),
                ("mask", json!({"type": "string"})),
                ("frames", json!({"type": "integer", "minimum": 1})),
                ("preprocess", json!({"type": ["string", "object"]})),
            ]))),
            FieldKind::Loras => json!({"anyOf": [{"type": "string"}, lora(), list(lora())]}),
            FieldKind::IcLora => json!({"anyOf": [{"type": "string"}, lora()]}),
            FieldKind::Metadata => {
                json!({"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}})
            }
            FieldKind::Retake => members(&[
                ("start", json!({"type": "number", "minimum": 0})),
                ("end", json!({"type": "number", "minimum": 0})),
                ("video", json!({"type": "boolean"})),
                ("audio", json!({"type": "boolean"})),
            ]),
            FieldKind::Tree => json!({"type": "object"}),
        }
    }
}

fn lora() -> Value {
    let scale = json!({"type": "number", "minimum": -2, "maximum": 2});
    members(&[("name", json!({"type": "string"})), ("scale", scale)])
}

fn unit() -> Value {
    json!({"type": "number", "minimum": 0, "maximum": 1})
}

fn image() -> Value {
    members(&[
        ("data", json!({"type": "string"})),
        ("file", json!({"type": "string"})),
        ("image_url", json!({"type": ["string", "object"]})),
        ("content", json!({"type": "string"})),
        ("role", json!({"enum": ["first_frame", "last_frame"]})),
        ("frame", json!({"type": "integer", "minimum": 0})),
        ("strength", unit()),
        ("crf", json!({"type": "integer", "minimum": 0, "maximum": 51})),
    ])
}

fn members(members: &[(&str, Value)]) -> Value {
    let members: Map<String, Value> =
        members.iter().map(|(name, schema)| ((*name).to_string(), schema.clone())).collect();
    json!({"type": "object", "properties": members, "additionalProperties": false})
}

/// Returns the schema of a request body, with every field under each of its names. Numbers, booleans, lists and objects
/// are also accepted as text.
pub(super) fn request_schema() -> Value {
    let mut properties = Map::new();
    for spec in &FIELDS {
        let mut schema = spec.schema();
        schema["description"] = spec.description.into();
        properties.insert(spec.name.into(), schema.clone());
        schema["description"] = format!("Alias of `{}`.", spec.name).into();
        properties.extend(spec.aliases.iter().map(|alias| ((*alias).to_string(), schema.clone())));
    }
    let wrapper = json!({"type": ["object", "string"], "description": "Object whose members are read as fields."});
    properties.extend(WRAPPERS.iter().map(|name| ((*name).to_string(), wrapper.clone())));
    json!({"type": "object", "required": ["prompt"], "properties": properties, "additionalProperties": false})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_name_has_a_description() {
        let schema = request_schema();
        let properties = schema["properties"].as_object().expect("fields");
        assert!(properties.len() > 80, "{} names", properties.len());
        assert!(properties.values().all(|field| field["description"].as_str().is_some_and(|text| !text.is_empty())));
        assert_eq!(properties["steps"]["maximum"], 256);
        assert_eq!(properties["n"]["enum"], json!(["1"]));
    }
}
