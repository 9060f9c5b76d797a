{{- define "atom.name" -}}
{{- ternary .Release.Name (printf "%s-atom" .Release.Name) (contains "atom" .Release.Name) | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- /* Not the service's name: LeaderWorkerSet makes a headless service of its own name. */ -}}
{{- define "atom.group" -}}
{{ include "atom.name" . }}-group
{{- end -}}

{{- define "atom.selector" -}}
app.kubernetes.io/name: atom
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "atom.labels" -}}
{{ include "atom.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Pods that have a server: all, or the first of each group. */ -}}
{{- define "atom.servers" -}}
{{ include "atom.selector" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "atom.image" -}}
{{- $repository := required "image.repository: the image that you built from deploy/images" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "atom.check" -}}
{{- if and (not .Values.auth.existingSecret) (not .Values.auth.open) -}}
{{- fail "auth.existingSecret: name a Secret with the key api-key, or serve everybody with auth.open=true" -}}
{{- end -}}
{{- if and .Values.gpu.resource (lt (int .Values.gpu.count) 1) -}}
{{- fail "gpu.count: how many of gpu.resource does a pod get?" -}}
{{- end -}}
{{- if and .Values.multiNode.enabled (lt (int .Values.multiNode.size) 2) -}}
{{- fail "multiNode.size: at least 2 pods; one machine needs no multiNode" -}}
{{- end -}}
{{- end -}}
