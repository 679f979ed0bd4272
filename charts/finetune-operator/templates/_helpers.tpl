{{/*
Names of objects do not depend on the release: the operator finds its Lease, Secret and Service by name, and jobs find its pods by label.
*/}}
{{- define "finetune-operator.name" -}}finetune-operator{{- end }}

{{/* Selector of the Deployment, the Services and the policies. */}}
{{- define "finetune-operator.selector" -}}
app.kubernetes.io/name: finetune-operator
app.kubernetes.io/component: operator
{{- end }}

{{- define "finetune-operator.account" -}}
{{ .Values.serviceAccount.name | default (include "finetune-operator.name" .) }}
{{- end }}

{{/*
Metadata of an object: dict "root" $, "name"; optional: "namespace" ("" for cluster-scoped objects), "labels" and "annotations".
*/}}
{{- define "finetune-operator.metadata" -}}
{{- $root := .root -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_"))
  "app.kubernetes.io/name" "finetune-operator"
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "app.kubernetes.io/part-of" "finetune-operator" -}}
{{- $annotations := merge (dict) (.annotations | default dict) $root.Values.annotations -}}
name: {{ .name | quote }}
{{- with (hasKey . "namespace" | ternary .namespace $root.Release.Namespace) }}
namespace: {{ . | quote }}
{{- end }}
labels:
  {{- merge (dict) (.labels | default dict) $own $root.Values.labels | toYaml | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Full name of an image: dict "root" $, "image" values in the form of .Values.image. */}}
{{- define "finetune-operator.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry | trimSuffix "/" -}}
{{- with $registry }}{{ . }}/{{ end -}}
{{- .image.repository -}}
{{- if or .image.tag (not .image.digest) }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{/* Our images whose names have no registry, as the subject of a sentence with its verb; empty: both have one. Nobody publishes them. */}}
{{- define "finetune-operator.bare-images" -}}
{{- $bare := list -}}
{{- range $image := list .Values.image .Values.trainer.image -}}
{{- $name := include "finetune-operator.image" (dict "root" $ "image" $image) -}}
{{- if not (contains "/" $name) -}}{{- $bare = append $bare $name -}}{{- end -}}
{{- end -}}
{{- if $bare -}}{{ join " and " $bare }} {{ len $bare | eq 1 | ternary "is" "are" }} named{{- end -}}
{{- end }}

{{/* settings.yaml. Without permission for TokenReviews, the API server's public keys verify progress tokens; without permission to read nodes, none are read. */}}
{{- define "finetune-operator.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $image := include "finetune-operator.image" (dict "root" . "image" .Values.trainer.image) -}}
{{- $vllm := include "finetune-operator.image" (dict "root" . "image" .Values.vllm.image) -}}
{{- $_ := set $settings "defaults" (merge (dict "image" $image "vllmImage" $vllm) ($settings.defaults | default dict)) -}}
{{- if .Values.watchNamespaces -}}
{{- $_ := set $settings "namespaces" .Values.watchNamespaces -}}
{{- if not .Values.rbac.tokenReview -}}
{{- $_ := set $settings "progress" (merge (dict) ($settings.progress | default dict) (dict "tokens" "keys")) -}}
{{- end -}}
{{- if not .Values.rbac.nodes -}}
{{- /* Not by merge, which ignores false. */ -}}
{{- $_ := set $settings "nodes" (set ($settings.nodes | default dict) "read" false) -}}
{{- end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* Namespace of the job of `helm test`. */}}
{{- define "finetune-operator.test-namespace" -}}
{{ .Values.tests.namespace | default (first .Values.watchNamespaces) | default .Release.Namespace }}
{{- end }}
